"""From the bytes of a streamed answer to its pieces: server-sent events, and binary frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from aiohttp import StreamReader

from jaxserve.client.chunks import Part, decode_chunk, parts_of
from jaxserve.errors import APIError, ConnectionFailed
from jaxserve.token_stream import LENGTH, MAX_FRAME_BYTES, End, Failure, Start, decode_frame

DATA, DONE = b"data:", b"[DONE]"


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
        try:
            chunk = decode_chunk(event)
        except msgspec.DecodeError as error:
            raise ConnectionFailed(f"an event is none of a completion: {error}") from error
        if chunk.error is not None:
            raise api_error(500, chunk.error)
        for part in parts_of(chunk):
            yield part
    raise ConnectionFailed("the stream ended without [DONE]")


async def event_data(content: StreamReader) -> AsyncIterator[bytes]:
    """The data of each event, of however many lines; comments and other fields are passed over."""
    found: list[bytes] = []
    async for line in lines_of(content):
        if line.startswith(DATA):
            found.append(line.removeprefix(DATA).removeprefix(b" "))
        elif not line and found:
            yield b"\n".join(found)
            found = []


async def lines_of(content: StreamReader) -> AsyncIterator[bytes]:
    """Whole lines, however long, without their ends."""
    begun: list[bytes] = []  # of a line: joined when it is whole, not whenever more of it comes
    async for data in content.iter_any():
        *ends, rest = data.split(b"\n")
        for end in ends:
            yield b"".join((*begun, end)).removesuffix(b"\r")
            begun = []
        begun.append(rest)


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
