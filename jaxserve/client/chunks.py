"""The chunks of a stream of server-sent events, this server's or another's, as the parts of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from jaxserve.token_stream import Call, End, Piece

Part = Piece | End
"""What a stream consists of for its reader: pieces, and the count of tokens at the end."""


class FunctionDelta(msgspec.Struct, frozen=True):
    """What is new of a call: its function's name at first, then of the arguments."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True):
    """What is new of one call."""

    index: int
    function: FunctionDelta | None = None


class MessageDelta(msgspec.Struct, frozen=True):
    """What is new of a message. Some servers call what is thought `reasoning`."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[CallDelta, ...] | None = None


class TokenScore(msgspec.Struct, frozen=True):
    """A chat's logprob of a token."""

    logprob: float


class Scores(msgspec.Struct, frozen=True):
    """Logprobs: `content` those of a chat, `token_logprobs` those of a completion."""

    content: tuple[TokenScore, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """A choice: `delta` is a chat's, `text` a completion's."""

    index: int
    delta: MessageDelta | None = None
    text: str | None = None
    logprobs: Scores | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    """Of a prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """The count of tokens, in a stream's last chunk."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event. `error`: why the stream breaks off here, in whatever shape."""

    choices: tuple[ChunkChoice, ...] | None = None
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


def decode_chunk(event: bytes) -> Chunk:
    """The chunk that an event's data is. Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(event)


def parts_of(chunk: Chunk) -> Iterator[Part]:
    """A piece of each choice, and the count of tokens if the chunk tells it."""
    for choice in chunk.choices or ():
        yield piece_of(choice)
    if (usage := chunk.usage) is not None:
        details = usage.prompt_tokens_details or PromptDetails()
        yield End(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens or 0)


def piece_of(choice: ChunkChoice) -> Piece:
    """What a chunk says of a choice. Token ids are not told there."""
    delta = choice.delta or MessageDelta()
    calls = []
    for call in delta.tool_calls or ():
        function = call.function or FunctionDelta()
        calls.append(Call(call.index, function.name, function.arguments or ""))
    scores = choice.logprobs or Scores()
    logprobs = scores.token_logprobs
    if scores.content is not None:
        logprobs = tuple(token.logprob for token in scores.content)
    return Piece(
        choice.index,
        text=choice.text or delta.content or "",
        reasoning=delta.reasoning_content or delta.reasoning or "",
        calls=tuple(calls),
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
    )
