"""An answer as binary frames: what a client gets that asks for `Accept: application/x-msgpack`.

A frame is its length, a 32-bit little-endian number, and so many bytes: one msgpack map whose
`type` says which of the classes below it is. A stream is a `start`; then a `piece` whenever
something of a choice has become certain; then an `end`. A stream that fails after its first piece
has an `error` in place of the `end`. Readers pass over keys they do not know.
"""

from __future__ import annotations

import struct

import msgspec

CONTENT_TYPE = "application/x-msgpack"
LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


class Start(msgspec.Struct, frozen=True, tag="start", tag_field="type"):
    """The first frame. Attributes: as of an OpenAI answer."""

    id: str
    created: int
    model: str


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of one call of a function.

    Attributes:
        index: of the call in its choice.
        name: of the function, on the call's first piece.
        arguments: to append: JSON.
    """

    index: int
    name: str | None = None
    arguments: str = ""


class Piece(msgspec.Struct, frozen=True, omit_defaults=True, tag="piece", tag_field="type"):
    """What has become certain about a choice.

    Attributes:
        index: of the choice.
        token_ids: generated, since the choice's piece before. Tokens whose text is held back come
            with it.
        text: of the answer. reasoning: what was thought before it.
        calls: of functions.
        logprobs: of each token, if asked for; those of an echoed prompt come first, and the first
            of them is null.
        top_logprobs: with them: of each token, [token id, log-probability] of the likeliest.
        finish_reason: on the choice's last piece.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    finish_reason: str | None = None


class End(msgspec.Struct, frozen=True, tag="end", tag_field="type"):
    """The last frame of an answer that is whole: its tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Failure(msgspec.Struct, frozen=True, tag="error", tag_field="type"):
    """The last frame of an answer that broke off. Attributes: as of an OpenAI error."""

    message: str
    kind: str
    param: str | None = None
    code: str | None = None


Frame = Start | Piece | End | Failure
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """Length and content."""
    content = _encoder.encode(frame)
    return LENGTH.pack(len(content)) + content


def decode_frame(content: bytes) -> Frame:
    """A frame without its length. Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(content)
