"""What the server needs of a tokenizer, and what it does for a model that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from jaxserve.errors import RequestError


class Detokenizer(Protocol):
    """Turns one sequence's ids into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that is certain now. Empty while a character is incomplete."""

    def flush(self) -> str:
        """What is left when no more ids come."""


class Tokenizer(Protocol):
    """What the server uses of `jaxserve.tokenizer.Tokenizer`."""

    chat_template: str
    template_variables: frozenset[str]

    def encode(self, text: str, *, param: str) -> list[int]: ...

    def encode_prompt(self, text: str) -> list[int]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_arguments: Mapping[str, object] = ...,
    ) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_id(self, name: str) -> int | None: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown: Set[str] = frozenset(),
    ) -> Detokenizer: ...


class BareIds:
    """Stands in for the tokenizer of a model without one: text is the ids, a space after each."""

    chat_template = ""
    template_variables: frozenset[str] = frozenset()

    def encode(self, text: str, *, param: str) -> list[int]:
        raise RequestError("this model has no tokenizer: there are no words", param=param)

    def encode_prompt(self, text: str) -> list[int]:
        raise RequestError("this model has no tokenizer: send the prompt as token ids")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_arguments: Mapping[str, object] | None = None,
    ) -> list[int]:
        raise RequestError("this model has no tokenizer: use /v1/completions with token ids")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f"{token_id} " for token_id in ids)

    def token_id(self, name: str) -> int | None:
        return None

    def token_bytes(self, token_id: int) -> bytes:
        return f"{token_id} ".encode()

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown: Set[str] = frozenset(),
    ) -> Detokenizer:
        return _BareIdText()


class _BareIdText:
    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""
