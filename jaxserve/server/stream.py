"""An answer as server-sent events. Most of a chunk never changes, so it is encoded once."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET, UnsetType

from jaxserve.server.calls import call_deltas
from jaxserve.server.choice import Delta
from jaxserve.server.generation import Generation
from jaxserve.server.logprobs import chat_logprobs
from jaxserve.server.replies import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    Completion,
    ErrorDetail,
    ErrorReply,
    Usage,
    encode,
)
from jaxserve.server.text import Tokenizer
from jaxserve.server.whole import completion_choice, with_ids

EVENTS = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
NOTHING = Delta("", (), None)
PLACE = "\x00text\x00"
"""Where a chunk's text goes: no model's name and no id contains this."""


def event(reply: object) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % encode(reply)


class ChunkEncoder:
    """Writes the chunks of one answer."""

    content_type = EVENTS

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        model: str,
        created: int,
        usage_so_far: Callable[[], Usage] | None = None,
    ) -> None:
        """`usage_so_far` is for chunks that have to tell it."""
        self._generation = generation
        self._tokenizer = tokenizer
        self._model = model
        self._created = created
        self._usage: Usage | UnsetType | None
        self._usage = None if generation.include_usage else UNSET
        self._usage_so_far = usage_so_far
        self._shows_ids = generation.return_token_ids
        self._only_text = usage_so_far is None and not self._shows_ids
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def begin(self) -> bytes:
        """Nothing comes before the first piece."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """The event for a choice's next piece; for its first one of a chat, two."""
        role = b""
        if self._usage_so_far is not None:
            self._usage = self._usage_so_far()
        first = index not in self._around
        if first:
            head, _, tail = self._full(index, Delta(PLACE, (), None)).partition(encode(PLACE))
            self._around[index] = head, tail
            if self._generation.chat:
                role = self._chat_chunk(index, ChatDelta("assistant", ""), NOTHING, first=True)
        if delta.reasoning or delta.calls:
            return role + self._parts(index, delta)
        if delta.scored or delta.finish_reason is not None or not self._only_text:
            return role + self._full(index, delta, first=first)
        head, tail = self._around[index]
        return b"%b%b%b%b" % (role, head, encode(delta.text), tail)

    def end(self, usage: Usage) -> bytes:
        """[DONE], after a chunk with no choices for clients that asked for the count."""
        if not self._generation.include_usage:
            return DONE
        kind = ChatChunk if self._generation.chat else Completion
        last = kind(self._generation.answer_id, self._created, self._model, [], usage)
        return event(last) + DONE

    def broken(self, error: ErrorDetail) -> bytes:
        """How a stream says that it breaks off. No [DONE] follows."""
        return event(ErrorReply(error))

    def _full(self, index: int, delta: Delta, *, first: bool = False) -> bytes:
        if self._generation.chat:
            content = ChatDelta(content=delta.text) if delta.text else ChatDelta()
            return self._chat_chunk(index, content, delta)
        top = self._generation.top_logprobs
        choice = completion_choice(index, delta, self._tokenizer, top)
        if self._shows_ids:
            choice = with_ids(choice, delta, self._generation, first=first)
        answer_id = self._generation.answer_id
        return event(Completion(answer_id, self._created, self._model, [choice], self._usage))

    def _parts(self, index: int, delta: Delta) -> bytes:
        """An event for each of thoughts, content, pieces of calls, and the end."""
        parts = []
        if delta.reasoning:
            parts.append(ChatDelta(reasoning_content=delta.reasoning, reasoning=delta.reasoning))
        if delta.text:
            parts.append(ChatDelta(content=delta.text))
        short_ids = self._generation.reading.short_ids
        for piece in delta.calls:
            parts += [ChatDelta(tool_calls=[d]) for d in call_deltas(piece, short_ids=short_ids)]
        scores = Delta("", delta.scored, None, token_ids=delta.token_ids)
        events = [self._chat_chunk(index, parts[0], scores)]
        events += [self._chat_chunk(index, part, NOTHING) for part in parts[1:]]
        if delta.finish_reason is not None:
            events.append(self._chat_chunk(index, ChatDelta(), Delta("", (), delta.finish_reason)))
        return b"".join(events)

    def _chat_chunk(
        self, index: int, content: ChatDelta, delta: Delta, *, first: bool = False
    ) -> bytes:
        top = self._generation.top_logprobs
        scores = None
        if top is not None and delta.scored:
            scores = chat_logprobs(delta.scored, self._tokenizer, top)
        ids: tuple[int, ...] | UnsetType = UNSET
        prompt_ids: tuple[int, ...] | UnsetType = UNSET
        if self._shows_ids:
            ids = delta.token_ids or UNSET
            prompt_ids = self._generation.prompts[0].ids if first else UNSET
        choice = ChatChunkChoice(index, content, scores, delta.finish_reason, ids)
        answer_id = self._generation.answer_id
        chunk = ChatChunk(answer_id, self._created, self._model, [choice], self._usage, prompt_ids)
        return event(chunk)
