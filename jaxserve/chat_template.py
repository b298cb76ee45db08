"""Conversations to text: checks the messages, then runs the model's own template on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import jinja2

from checkpoints.model_config import TokenizerSpec
from jaxserve.errors import RequestError
from jaxserve.template_sandbox import BoundedTemplate, RenderLimits, TemplateRefusal

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_PROBE = "probe"
_CALL = {"id": "probe0123", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
_END = "\ue000end\ue000"
"""Marks the end of a content in what a template writes."""


class ChatTemplate:
    """A model's chat template, compiled once. Threads may share it.

    Attributes:
        source: its text.
        variables: that it looks at; none if it does not compile.
    """

    def __init__(self, spec: TokenizerSpec, *, limits: RenderLimits | None = None) -> None:
        """Compile the template of `spec`, which must have one.

        A template that does not compile is no reason not to serve plain prompts: it is reported
        by `render`.
        """
        named = {"bos_token": spec.bos_token, "eos_token": spec.eos_token}
        named |= dict(spec.special_tokens)
        self.source = spec.chat_template or ""
        self.variables: frozenset[str] = frozenset()
        self._variables: dict[str, object] = {"tools": None, "documents": None}
        # A token the model lacks stays undefined: None would be written out as "None".
        self._variables |= {name: text for name, text in named.items() if text is not None}
        self._template: BoundedTemplate | None = None
        self._broken = ""
        self._content_as_parts = False
        self._content_may_be_null = False
        try:
            self._template = BoundedTemplate(self.source, limits=limits)
        except Exception as error:  # a stranger's program: jinja2 may fail on it in many ways
            self._broken = f"{type(error).__name__}: {error}"
        else:
            self.variables = self._template.variables
            self._content_as_parts = not self._shows(_PROBE) and self._shows(_parts(_PROBE))
            self._content_may_be_null = self._takes_null()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_arguments: Mapping[str, object],
    ) -> str:
        """The conversation as the model wants to read it.

        Args:
            messages: see `check_messages`.
            add_generation_prompt: end where the assistant's next turn begins.
            tools: functions that may be called, as OpenAI's API describes them.
            template_arguments: further variables, for templates with switches of their own.

        Raises:
            RequestError: a message is malformed, an argument would replace one of ours, or the
                template refuses the conversation, fails, or goes on for too long.
        """
        turns = check_messages(messages)
        if not self._content_may_be_null:
            turns = [turn | {"content": turn["content"] or ""} for turn in turns]
        if self._content_as_parts:
            turns = [
                turn if turn["content"] is None else turn | {"content": _parts(turn["content"])}
                for turn in turns
            ]
        ours = self._variables | {
            "messages": turns,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
        }
        for name in template_arguments:
            if name in ours or name in ("raise_exception", "strftime_now"):
                raise RequestError(
                    f"the template argument {name!r} is set by the server and cannot be replaced",
                    param="chat_template_kwargs",
                )
        if self._template is None:
            raise RequestError(
                f"the model's chat template does not compile ({self._broken}): use /v1/completions",
                param="messages",
            )
        try:
            return self._template.render({**template_arguments, **ours})
        except TemplateRefusal as error:
            message = f"the chat template refuses this conversation: {error}"
            raise RequestError(message, param="messages") from error
        except Exception as error:  # whatever the template's expressions raise is about this input
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            message = f"the chat template fails on this conversation: {kind}{error}"
            raise RequestError(message, param="messages") from error

    def _shows(self, content: object) -> bool:
        # Some templates only loop over parts and would silently drop a plain string.
        return _PROBE in (self._try({"role": "user", "content": content}) or "")

    def _takes_null(self) -> bool:
        # Where calls stand in place of text some templates look for the null, and some fail on it.
        asked: dict[str, object] = {"role": "user", "content": _PROBE}
        called: dict[str, object] = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
        result: dict[str, object] = {"role": "tool", "content": _PROBE, "tool_call_id": _CALL["id"]}
        with_null = self._try(asked, called, result)
        if with_null is None:
            return False
        without = self._try(asked, called | {"content": ""}, result) or ""
        return with_null.count("None") == without.count("None")

    def _try(self, *turns: dict[str, object]) -> str | None:
        assert self._template is not None
        variables = self._variables | {"messages": list(turns), "add_generation_prompt": True}
        try:
            return self._template.render(variables)
        except Exception:  # a refusal says nothing about the form of content
            return None


def render_open(
    render: Callable[[Sequence[Mapping[str, object]]], str],
    messages: Sequence[Mapping[str, object]],
) -> str:
    """The conversation up to the end of its last message's content, for the model to go on there.

    Args:
        render: messages to text.
        messages: see `check_messages`.

    Raises:
        RequestError: the last message has no content, or the template does not show it.
    """
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or not content:
        raise RequestError(
            "continue_final_message needs text in the last message", param="continue_final_message"
        )
    text, end, _ = render([*messages[:-1], {**messages[-1], "content": content + _END}]).rpartition(
        _END
    )
    if not end:
        raise RequestError(
            "continue_final_message is not possible: this model's chat template does not show the "
            "last message as it is",
            param="continue_final_message",
        )
    return text


def check_messages(messages: object) -> list[dict[str, object]]:
    """The messages in the one form templates get: `content` is a string.

    Content may be a string, a list of {"type": "text", "text": ...} parts (joined), or, for an
    assistant, null. That reads as empty, except where calls stand in its place: there it stays, for
    templates that look for it. Other fields that are null count as absent.

    Raises:
        RequestError: naming the place, such as `messages[2].content`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise _wrong("messages", "a list of messages", messages)
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: object, place: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise _wrong(place, "an object with role and content", message)
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise _wrong(f"{place}.role", "one word such as 'user'", role)
    if "content" not in message:
        raise RequestError(f"{place}.content is missing", param=f"{place}.content")
    content: str | None = None
    if message["content"] is not None or not message.get("tool_calls"):
        content = _check_content(message["content"], f"{place}.content", role)
    kept = {str(name): value for name, value in message.items() if value is not None}
    return kept | {"content": content}


def _check_content(content: object, place: str, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _wrong(place, "a string or a list of text parts", content)
    return "".join(_check_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _check_part(part: object, place: str) -> str:
    if not isinstance(part, Mapping):
        raise _wrong(place, 'an object such as {"type": "text", "text": "..."}', part)
    kind = part.get("type")
    if kind != "text":
        raise _unsupported(f"{place}.type", f"content of type {kind!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong(f"{place}.text", "a string", text)
    return text


def _parts(text: object) -> list[dict[str, object]]:
    return [{"type": "text", "text": text}]


def _wrong(place: str, expected: str, found: object) -> RequestError:
    shown = repr(found)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return RequestError(f"{place} must be {expected}, not {shown}", param=place)


def _unsupported(place: str, what: str) -> RequestError:
    return RequestError(f"{place}: {what} is not supported, only text is", param=place)
