"""Batches on disk: what each was asked to do, how far it is, and the lines it has answered."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from jaxserve.errors import NotFound, Overloaded
from jaxserve.server.batch_lines import LineError, Response, Result
from jaxserve.server.disk import cut_broken_line, write_whole
from jaxserve.server.file_store import KEY_SHARE, new_file_id

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED = ("failed", "completed", "expired", "cancelled")
WINDOW = 24 * 3600
MAX_BATCHES = 1000


class RequestCounts(msgspec.Struct, frozen=True):
    """Lines: of the input, answered, and with an error instead of an answer."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    data: tuple[BatchError, ...]
    object: Literal["list"] = "list"


class Batch(msgspec.Struct, frozen=True):
    """A batch, as clients see it. Times are Unix times; None is not yet."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    completion_window: str = "24h"
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    errors: BatchErrors | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    object: Literal["batch"] = "batch"


class Record(msgspec.Struct):
    """What is on disk of a batch. `outputs`, `errors`: files it will have, named beforehand."""

    batch: Batch
    owner: str
    outputs: str
    errors: str


class BatchStore:
    """A folder of batches. What is not the asker's own is not there for it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        found = [
            msgspec.json.decode(path.read_bytes(), type=Record) for path in folder.glob("*.json")
        ]
        found.sort(key=lambda record: record.batch.created_at)
        self.records = {record.batch.id: record for record in found}

    def create(
        self, endpoint: str, file_id: str, metadata: dict[str, str] | None, owner: str
    ) -> Record:
        """A batch that has not begun. The oldest one that has ended makes room for it, if there is
        one, of the same owner.

        Raises:
            Overloaded: too many have not ended.
        """
        pending = [r.owner for r in self.records.values() if r.batch.status not in ENDED]
        share = MAX_BATCHES // KEY_SHARE if owner else MAX_BATCHES
        if pending.count(owner) >= share:
            whose = "of this API key " if owner else ""
            raise Overloaded(f"{share} batches {whose}have not ended", retry_after=60.0)
        if len(self.records) >= MAX_BATCHES:
            ended = [r for r in self.records.values() if r.batch.status in ENDED]
            if not ended:
                raise Overloaded(f"{MAX_BATCHES} batches have not ended", retry_after=60.0)
            oldest = min(ended, key=lambda record: record.owner != owner).batch.id
            del self.records[oldest]
            (self._folder / f"{oldest}.json").unlink(missing_ok=True)
        now = int(time.time())
        batch_id = f"batch_{secrets.token_hex(12)}"
        batch = Batch(batch_id, endpoint, file_id, now, now + WINDOW, metadata=metadata)
        record = Record(batch, owner, new_file_id(), new_file_id())
        self.save(record)  # first: what is not on the disk is nobody's to work on
        self.records[batch_id] = record
        return record

    def save(self, record: Record) -> None:
        path = self._folder / f"{record.batch.id}.json"
        write_whole(path, msgspec.json.encode(record))

    def get(self, batch_id: str, owner: str) -> Record:
        """Raises NotFound."""
        record = self.records.get(batch_id)
        if record is None or record.owner != owner:
            raise NotFound(f"there is no batch {batch_id[:80]!r}", param="batch_id")
        return record

    def all_of(self, owner: str) -> list[Record]:
        """Oldest first."""
        return [record for record in self.records.values() if record.owner == owner]

    def reads(self, file_id: str) -> str | None:
        """The batch that has not ended and reads this file."""
        for record in self.records.values():
            if record.batch.input_file_id == file_id and record.batch.status not in ENDED:
                return record.batch.id
        return None


class Answered:
    """The lines of a batch that are done: two files that only grow, and what is in them.

    Every line of the input comes to be in one of them, once: a line's number is in its `id`.
    """

    def __init__(self, folder: Path, batch_id: str) -> None:
        """Go on where the files end."""
        self.batch_id = batch_id
        self.outputs = folder / f"{batch_id}.outputs.jsonl"
        self.errors = folder / f"{batch_id}.errors.jsonl"
        self.numbers: set[int] = set()
        counts = []
        for path in (self.outputs, self.errors):
            path.touch()
            cut_broken_line(path)
            with path.open("rb") as lines:
                numbers = set(line_numbers(lines))
            self.numbers |= numbers
            counts.append(len(numbers))
        self.num_completed, self.num_failed = counts
        self._files = self.outputs.open("ab"), self.errors.open("ab")

    def add(
        self,
        number: int,
        custom_id: str | None,
        *,
        status: int = 0,
        body: bytes = b"",
        error: LineError | None = None,
    ) -> None:
        """What came of a line: an answer's status and JSON, or why there is none."""
        line_id = f"{self.batch_id.replace('batch_', 'batch_req_')}_{number}"
        response = None if error is not None else Response(status, line_id, msgspec.Raw(body))
        failed = status != 200
        file = self._files[failed]
        file.write(msgspec.json.encode(Result(line_id, custom_id, response, error)) + b"\n")
        file.flush()
        self.numbers.add(number)
        if failed:
            self.num_failed += 1
        else:
            self.num_completed += 1

    def close(self) -> None:
        for file in self._files:
            file.close()

    def remove(self) -> None:
        """They are the batch's files now."""
        self.outputs.unlink()
        self.errors.unlink()


def line_numbers(lines: Iterable[bytes]) -> Iterator[int]:
    """The numbers in the ids of answered lines."""
    decode = msgspec.json.Decoder(Result).decode
    for line in lines:
        yield int(decode(line).id.rsplit("_", 1)[1])
