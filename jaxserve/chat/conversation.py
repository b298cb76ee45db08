"""A conversation: what has been said, and how quickly the last answer came. No terminal."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.client.synchronous import Client
from jaxserve.token_stream import End, Piece


@dataclass(frozen=True, slots=True)
class Stats:
    """Of one answer.

    Attributes:
        ttft: seconds to its first piece.
        seconds: from the question to the last piece.
        prompt_tokens, completion_tokens, cached_tokens: as the server counts them; None if the
            answer was stopped.
    """

    ttft: float
    seconds: float
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    def __str__(self) -> str:
        line = f"first token after {self.ttft * 1e3:,.0f} ms, {self.seconds:.1f} s in all"
        if self.completion_tokens is None:
            return line + "; it was stopped"
        pace = (self.completion_tokens - 1) / max(1e-9, self.seconds - self.ttft)
        return (
            f"{line}; {self.completion_tokens} tokens, {pace:,.1f} a second; a prompt of "
            f"{self.prompt_tokens} tokens, {self.cached_tokens} of them known"
        )


class Conversation:
    """One conversation with a model.

    Attributes:
        messages: what has been said, oldest first, the system prompt included.
        stats: of the last answer; None before there is one.
    """

    def __init__(self, client: Client, parameters: Mapping[str, Any], system: str | None) -> None:
        self._client = client
        self._parameters = parameters
        self.messages: list[dict[str, str]] = []
        self.stats: Stats | None = None
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Begin anew."""
        self.messages = [] if not system else [{"role": "system", "content": system}]

    @property
    def system(self) -> str | None:
        """The system prompt."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    def ask(self, text: str) -> Generator[Piece, None, None]:
        """The answer as it comes. Left early, what has come is what was said.

        A question that got no answer at all is taken back.
        """
        self.messages.append({"role": "user", "content": text})
        said, asked, first = "", time.perf_counter(), None
        end: End | None = None
        try:
            for part in self._client.stream_chat(self.messages, **self._parameters):
                if isinstance(part, End):
                    end = part
                    continue
                first = first or time.perf_counter()
                said += part.text
                yield part
        finally:
            now = time.perf_counter()
            if first is None:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": said})
                counted = () if end is None else _counts(end)
                self.stats = Stats(first - asked, now - asked, *counted)


def _counts(end: End) -> tuple[int, int, int]:
    return end.prompt_tokens, end.completion_tokens, end.cached_tokens
