"""The lines of a batch: a request in, its answer or what went wrong out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

MAX_LINES = 50_000
CUSTOM_ID = 512
"""Most characters of a line's name."""


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the input."""

    custom_id: str
    method: str
    url: str
    body: dict[str, msgspec.Raw]


class Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str


class Result(msgspec.Struct, frozen=True):
    """A line of the output or of the errors: a response, or why there is none."""

    id: str
    custom_id: str | None
    response: Response | None = None
    error: LineError | None = None


class BadLine(Exception):
    """A line that is no request. `custom_id`: its name, if it has one."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


decode_line = msgspec.json.Decoder(Line).decode


def read_line(raw: bytes, endpoint: str, taken: set[str], max_bytes: int) -> Line:
    """A line of a batch of this endpoint. Its custom_id joins those that are taken.

    Raises:
        BadLine: it is none.
    """
    if len(raw) > max_bytes:
        raise BadLine(f"the line is larger than {max_bytes} bytes")
    try:
        line = decode_line(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"the line is no request: {error}") from None
    name = line.custom_id
    if not 1 <= len(name) <= CUSTOM_ID:
        raise BadLine(f"custom_id has {len(name)} characters, 1 to {CUSTOM_ID} are allowed")
    if name in taken:
        raise BadLine("custom_id is that of a line before", name)
    taken.add(name)
    if line.method != "POST":
        raise BadLine(f"method is {line.method[:20]!r}: it must be 'POST'", name)
    if line.url != endpoint:
        raise BadLine(f"url is {line.url[:80]!r}: it must be the batch's, {endpoint!r}", name)
    if "stream" in line.body and bytes(line.body["stream"]) not in (b"false", b"null"):
        raise BadLine("stream must be false: the answer goes into a file", name)
    return line


def request_body(line: Line) -> bytes:
    """The body as a request's of its own, in the batch class."""
    return msgspec.json.encode(line.body | {"service_tier": msgspec.Raw(b'"batch"')})


def numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, each with its number in the file."""
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.isspace():
                yield number, raw


@dataclass(frozen=True)
class Scan:
    """What a file looks like from afar. `fault`: why it cannot be a batch."""

    num_lines: int = 0
    fault: str | None = None


def scan(path: Path) -> Scan:
    """Count the lines that are not blank. Blank ones take time as well, and room in the limit."""
    count = 0
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if number > MAX_LINES:
                return Scan(count, f"the file has more than {MAX_LINES} lines: split it")
            count += not raw.isspace()
    return Scan(count) if count else Scan(0, "the file has no lines: send one request a line")
