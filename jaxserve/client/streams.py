"""From the bytes of a streamed answer to its pieces: server-sent events, and binary frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
from aiohttp import StreamReader

from jaxserve.errors import APIError, ConnectionFailed
from jaxserve.token_stream import (
    LENGTH,
    MAX_FRAME_BYTES,
    Call,
    End,
    Failure,
    Piece,
    Start,
    decode_frame,
)

DATA, DONE = b"data:", b"[DONE]"
Part = Piece | End
"""What a stream consists of for its reader: pieces, and the count of tokens at the end."""


async def read_frames(content: StreamReader) -> AsyncGenerator[Part, None]:
    """The parts of a binary stream.

    Raises:
        APIError: the server broke it off.
        ConnectionFailed: it ended without its end.
    """
    while True:
        try:
            (length,) = LENGTH.unpack(await content.readexactly(LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise ConnectionFailed(f"a frame of {length} bytes is none of a token stream")
            frame = decode_frame(await content.readexactly(length))
        except asyncio.IncompleteReadError as error:
            raise ConnectionFailed("the stream ended before its last frame") from error
        except msgspec.DecodeError as error:
            raise ConnectionFailed(f"a frame is none of a token stream: {error}") from error
        match frame:
            case Failure():
                raise APIError(
                    500, frame.message, kind=frame.kind, param=frame.param, code=frame.code
                )
            case Start():
                continue
            case _:
                yield frame
        if isinstance(frame, End):
            return


async def read_events(content: StreamReader) -> AsyncGenerator[Part, None]:
    """The parts of a stream of server-sent events. Raises as `read_frames`."""
    async for event in event_data(content):
        if event == DONE:
            return
        chunk = msgspec.json.decode(event)
        if "error" in chunk:
            raise api_error(500, chunk)
        for choice in chunk.get("choices", ()):
            yield piece_of(choice)
        if (usage := chunk.get("usage")) is not None:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            yield End(usage["prompt_tokens"], usage["completion_tokens"], cached)
    raise ConnectionFailed("the stream ended without [DONE]")


async def event_data(content: StreamReader) -> AsyncIterator[bytes]:
    """The data of each event, of however many lines; comments and other fields are passed over."""
    lines: list[bytes] = []
    buffer = b""
    async for data in content.iter_any():
        buffer += data
        *whole, buffer = buffer.split(b"\n")
        for line in whole:
            line = line.removesuffix(b"\r")
            if line.startswith(DATA):
                lines.append(line.removeprefix(DATA).removeprefix(b" "))
            elif not line and lines:
                yield b"\n".join(lines)
                lines = []


def piece_of(choice: dict[str, Any]) -> Piece:
    """A choice of a chunk, of a chat or of a completion. Token ids are not told there."""
    delta = choice.get("delta") or {}
    calls = []
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append(Call(call["index"], function.get("name"), function.get("arguments") or ""))
    scores = choice.get("logprobs") or {}
    logprobs = scores.get("token_logprobs")
    if scores.get("content") is not None:
        logprobs = [token["logprob"] for token in scores["content"]]
    return Piece(
        choice["index"],
        text=choice.get("text") or delta.get("content") or "",
        reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
        calls=tuple(calls),
        logprobs=None if logprobs is None else tuple(logprobs),
        finish_reason=choice.get("finish_reason"),
    )


def api_error(status: int, body: object, retry_after: float | None = None) -> APIError:
    """The error that a body tells of, in OpenAI's shape or in another."""
    found = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(found, dict):
        return APIError(status, str(found)[:500], retry_after=retry_after)
    return APIError(
        status,
        str(found.get("message", found)),
        kind=found.get("type"),
        param=found.get("param"),
        code=found.get("code"),
        retry_after=retry_after,
    )
