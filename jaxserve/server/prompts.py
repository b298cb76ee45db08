"""From what a client calls a prompt to token ids, checked before the worker sees any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxserve.errors import RequestError
from jaxserve.server.messages import plain_messages
from jaxserve.server.openai import ChatBody, CompletionBody
from jaxserve.server.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        ids: at least one, each in [0, V).
        text: as the client sent it; None for a prompt of ids or a chat.
    """

    ids: tuple[int, ...]
    text: str | None = None


def completion_prompts(
    body: CompletionBody, tokenizer: Tokenizer, vocab_size: int
) -> tuple[Prompt, ...]:
    """The prompts of a completion: a string, several, token ids, or several lists of them.

    Raises:
        RequestError: missing, empty, mixed, or an id outside [0, vocab_size).
    """
    if body.prompt is None:
        raise RequestError("prompt is missing: a string, a list of strings, or token ids")
    if isinstance(body.prompt, str):
        return (encode_text(body.prompt, "prompt", tokenizer),)
    if not body.prompt:
        raise RequestError("prompt is an empty list: send at least one token", param="prompt")
    texts = [item for item in body.prompt if isinstance(item, str)]
    ids = [item for item in body.prompt if isinstance(item, int)]
    lists = [item for item in body.prompt if isinstance(item, list)]
    if len(body.prompt) == len(ids):
        return (checked_ids(ids, "prompt", vocab_size),)
    if len(body.prompt) == len(texts):
        return tuple(encode_text(text, f"prompt[{i}]", tokenizer) for i, text in enumerate(texts))
    if len(body.prompt) == len(lists):
        return tuple(checked_ids(row, f"prompt[{i}]", vocab_size) for i, row in enumerate(lists))
    raise RequestError(
        f"prompt mixes {len(texts)} strings, {len(ids)} ids and {len(lists)} lists: "
        "all items must be of one kind",
        param="prompt",
    )


def encode_text(text: str, where: str, tokenizer: Tokenizer) -> Prompt:
    """A text prompt. Only a model that starts with BOS has anything to continue from no text."""
    ids = tokenizer.encode_prompt(text)
    if not ids:
        raise RequestError(f"{where} is empty: there is nothing to continue", param="prompt")
    return Prompt(tuple(ids), text)


def checked_ids(ids: list[int], where: str, vocab_size: int) -> Prompt:
    """A prompt of ids as the client sent it: nothing is added, nothing wraps."""
    if not ids:
        raise RequestError(f"{where} is an empty list: send at least one token", param="prompt")
    check_vocabulary(ids, where, vocab_size, param="prompt")
    return Prompt(tuple(ids))


def check_vocabulary(ids: list[int], where: str, vocab_size: int, *, param: str) -> None:
    """RequestError naming the first id outside [0, vocab_size)."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"{where} has token id {str(bad)[:40]}; ids of this model are 0 to {vocab_size - 1}",
            param=param,
        )


def chat_prompt(
    body: ChatBody, tokenizer: Tokenizer, tools: Sequence[Mapping[str, object]] | None = None
) -> Prompt:
    """The prompt of a chat, rendered by the model's own template.

    Args:
        tools: functions for the template to show.

    Raises:
        RequestError: no messages, a role or content that cannot be rendered, or whatever the
            template itself refuses.
    """
    if not body.messages:
        raise RequestError("messages is missing or empty: send at least one", param="messages")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: the answer goes "
            "on with the last message, or begins a turn of its own",
            param="continue_final_message",
        )
    ids = tokenizer.encode_chat(
        plain_messages(body.messages, with_tools="tools" in tokenizer.template_variables),
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        tools=tools,
        template_arguments=template_arguments(body, tokenizer),
    )
    if not ids:
        raise RequestError("the messages render to an empty prompt", param="messages")
    return Prompt(tuple(ids))


def template_arguments(body: ChatBody, tokenizer: Tokenizer) -> dict[str, object]:
    """What the client says to the template. RequestError for what it cannot say there."""
    arguments = dict(body.chat_template_kwargs or {})
    for reserved in ("messages", "add_generation_prompt", "tools"):
        if reserved in arguments:
            raise RequestError(
                f"chat_template_kwargs cannot set {reserved!r}: it has a field of its own",
                param="chat_template_kwargs",
            )
    effort = body.reasoning_effort
    if effort is not None:
        if "reasoning_effort" not in tokenizer.template_variables:
            raise RequestError(
                "reasoning_effort is not supported: this model's chat template does not look at "
                "it; what the template does look at can be set in chat_template_kwargs",
                param="reasoning_effort",
            )
        if arguments.setdefault("reasoning_effort", effort) != effort:
            raise RequestError(
                f"reasoning_effort is {effort[:40]!r} and another one is in chat_template_kwargs: "
                "send one",
                param="reasoning_effort",
            )
    return arguments
