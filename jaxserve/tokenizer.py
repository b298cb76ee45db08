"""Text to ids and back for one model: prompts, conversations, and BOS exactly once.

Knows no arrays and no requests. Threads may share a `Tokenizer`: encoding releases the GIL.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from tokenizers import Tokenizer as HubTokenizer

from checkpoints.model_config import TokenizerSpec
from jaxserve.chat_template import ChatTemplate, render_open
from jaxserve.detokenizer import IncrementalDetokenizer, TokenBytes
from jaxserve.errors import ConfigError, RequestError

NO_ARGUMENTS: Mapping[str, object] = MappingProxyType({})


class Tokenizer:
    """A model's vocabulary, its rule about BOS, and its chat template.

    Attributes:
        vocab_size: V, rows of the model's embedding. Every id is in [0, V).
        add_bos: a plain text prompt starts with BOS.
        has_chat_template: `encode_chat` and `render_chat` can be used.
        chat_template: its text, empty without one. The one for tools, if there is another.
        template_variables: that it looks at.
    """

    def __init__(self, spec: TokenizerSpec, *, vocab_size: int) -> None:
        """Load the vocabulary; compile the template.

        Args:
            spec: as the checkpoint gives it. Not kept: its JSON may be tens of megabytes.
            vocab_size: V.

        Raises:
            ConfigError: the vocabulary cannot be read, its decoder is unknown, or BOS is asked
                for and not in it.
        """
        self._tokenizer = _load(spec.tokenizer_json)
        _return_freed_memory()
        self._table = TokenBytes(self._tokenizer, vocab_size=vocab_size)
        self._bos_id = _bos_id(self._tokenizer, spec)
        self._template = ChatTemplate(spec) if spec.chat_template is not None else None
        self._tool_template = self._template
        if spec.tool_template is not None:
            self._tool_template = ChatTemplate(replace(spec, chat_template=spec.tool_template))
        self.vocab_size = vocab_size
        self.add_bos = spec.add_bos
        self.has_chat_template = self._template is not None
        template = self._tool_template
        self.chat_template = "" if template is None else template.source
        self.template_variables = frozenset[str]() if template is None else template.variables

    def encode(self, text: str, *, param: str) -> list[int]:
        """The ids of a piece of text, with nothing added.

        Special tokens written in the text are recognised as such. `param` names the request's
        field in errors.

        Raises:
            RequestError: the text is no valid Unicode, or needs ids the model lacks.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"character {error.start} of the text is U+{ord(text[error.start]):04X}, half of a "
                "surrogate pair; send the whole character",
                param=param,
            ) from error
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if ids and max(ids) >= self.vocab_size:
            raise RequestError(
                f"the text contains token {self._tokenizer.id_to_token(max(ids))!r} with id "
                f"{max(ids)}; the model has ids below {self.vocab_size}",
                param=param,
            )
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a plain text prompt.

        Special tokens written in the text are recognised as such. BOS is added if and only if
        the model wants it and the text does not already start with it; BOS tokens the client
        wrote are never removed.

        Raises:
            RequestError: the text is no valid Unicode, or needs ids the model lacks.
        """
        ids = self.encode(text, param="prompt")
        if self.add_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_arguments: Mapping[str, object] = NO_ARGUMENTS,
    ) -> list[int]:
        """The ids of a conversation, written out by the model's chat template.

        They start with one BOS if the template writes it, the model wants it, or both.

        Args, Raises: as `render_chat`.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_arguments=template_arguments,
        )
        ids = self.encode(text, param="messages")
        if self._bos_id is None:
            return ids
        written = 0
        while ids[written : written + 1] == [self._bos_id]:
            written += 1
        return [self._bos_id] * (self.add_bos or written > 0) + ids[written:]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_arguments: Mapping[str, object] = NO_ARGUMENTS,
    ) -> str:
        """The text of a conversation, as the model's chat template writes it.

        Args:
            messages: see `chat_template.check_messages`.
            add_generation_prompt: end where the assistant's next turn begins.
            continue_final_message: end where the content of the last message does.
            tools: functions that may be called, as OpenAI's API describes them.
            template_arguments: further variables for the template.

        Raises:
            RequestError: there is no template, a message is malformed, or the template fails.
        """
        with_tools = tools or any(message.get("tool_calls") for message in messages)
        template = self._tool_template if with_tools else self._template
        if template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions with a plain prompt",
                param="messages",
            )
        render = partial(
            template.render,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_arguments=template_arguments,
        )
        return render_open(render, messages) if continue_final_message else render(messages)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is not in [0, V).
        """
        text = self.detokenizer((), skip_special_tokens=skip_special_tokens)
        return "".join(map(text.push, ids)) + text.flush()

    def token_id(self, name: str) -> int | None:
        """The id of the one token that is spelled so in the vocabulary, if there is one."""
        return self._tokenizer.token_to_id(name)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text. Special tokens: their name, as UTF-8.

        Raises:
            ValueError: the id is not in [0, V).
        """
        return self._table[token_id]

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown: Set[str] = frozenset(),
    ) -> IncrementalDetokenizer:
        """A stream of text for tokens that continue `prompt_ids`.

        Special tokens named in `shown` have their text even if the others have none.
        """
        return IncrementalDetokenizer(
            self._table, prompt_ids, skip_special_tokens=skip_special_tokens, shown=shown
        )


def _load(tokenizer_json: str) -> HubTokenizer:
    try:
        tokenizer = HubTokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"the tokenizer's JSON cannot be read: {error}") from error
    tokenizer.no_truncation()  # published files may carry training-time settings
    tokenizer.no_padding()
    return tokenizer


def _return_freed_memory() -> None:
    # Reading a large vocabulary leaves several times its size in glibc's free lists (Gemma 3:
    # 390 MB resident, 120 MB in use), which a long-lived server would hold for good.
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if malloc_trim is not None:
            malloc_trim(0)


def _bos_id(tokenizer: HubTokenizer, spec: TokenizerSpec) -> int | None:
    bos_id = None if spec.bos_token is None else tokenizer.token_to_id(spec.bos_token)
    if spec.add_bos and bos_id is None:
        raise ConfigError(
            f"add_bos is set, but bos_token is {spec.bos_token!r}, which the vocabulary lacks"
        )
    return bos_id
