"""An answer as binary frames, for clients that would rather not parse text."""

from __future__ import annotations

from jaxserve.server.choice import Delta, ScoredToken
from jaxserve.server.generation import Generation
from jaxserve.server.logprobs import finite
from jaxserve.server.replies import ErrorDetail, Usage
from jaxserve.token_stream import CONTENT_TYPE, Call, End, Failure, Piece, Start, encode_frame


class BinaryEncoder:
    """Writes the frames of one answer."""

    content_type = CONTENT_TYPE

    def __init__(self, generation: Generation, *, model: str, created: int) -> None:
        self._scores = generation.top_logprobs is not None
        self._start = Start(generation.answer_id, created, model)

    def begin(self) -> bytes:
        """What the answer is called."""
        return encode_frame(self._start)

    def delta(self, index: int, delta: Delta) -> bytes:
        """A choice's next piece."""
        piece = Piece(
            index,
            delta.token_ids,
            delta.text,
            delta.reasoning,
            tuple(Call(call.index, call.name, call.arguments) for call in delta.calls),
            tuple(own_logprob(item) for item in delta.scored) if self._scores else None,
            tuple(alternatives(item) for item in delta.scored) if self._scores else None,
            delta.finish_reason,
        )
        return encode_frame(piece)

    def end(self, usage: Usage) -> bytes:
        """The last frame. It always counts the tokens."""
        cached = usage.prompt_tokens_details.cached_tokens
        return encode_frame(End(usage.prompt_tokens, usage.completion_tokens, cached))

    def broken(self, error: ErrorDetail) -> bytes:
        """The last frame of an answer that breaks off."""
        return encode_frame(Failure(error.message, error.type, error.param, error.code))


def own_logprob(item: ScoredToken) -> float | None:
    """Of the token; None for the first one of a prompt."""
    return None if item.event.logprob is None else finite(item.event.logprob)


def alternatives(item: ScoredToken) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens in its place."""
    return tuple((token_id, finite(logprob)) for token_id, logprob in item.event.top_logprobs)
