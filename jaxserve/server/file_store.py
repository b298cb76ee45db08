"""Files that clients leave here, and those that batches make: content and a record beside it."""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from jaxserve.errors import NotFound, RequestError
from jaxserve.server.disk import write_whole

MAX_FILE_BYTES = 200 << 20
MAX_FILES = 10_000
MAX_TOTAL_BYTES = 20 << 30
KEY_SHARE = 4
"""One API key may have a fourth of both: it cannot fill the server for the others."""
MAX_NAME = 255

Purpose = Literal["batch", "batch_output"]


class FileObject(msgspec.Struct, frozen=True):
    """A file, as clients see it. `bytes`: its size; `created_at`: Unix time."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class Record(msgspec.Struct, frozen=True):
    """What is on disk of a file besides its content. `owner`: name of an API key, or empty."""

    file: FileObject
    owner: str


class FileStore:
    """A folder of files. What is not the asker's own is not there for it."""

    def __init__(self, folder: Path) -> None:
        """Take up what is in the folder; drop uploads that were never finished."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._records: dict[str, Record] = {}
        self._num_files: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        for part in folder.glob("*.part"):
            part.unlink()
        found = [read_record(path) for path in folder.glob("*.json")]
        for record in sorted(found, key=lambda record: record.file.created_at):
            if self.path(record.file.id).exists():
                self._remember(record)

    def path(self, file_id: str) -> Path:
        """Where the content of a file is."""
        return self._folder / f"{file_id}.jsonl"

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Count bytes that are on their way in; `release` them once they are kept, or not.

        RequestError if no file, or none with so many bytes more, can be taken.
        """
        share = KEY_SHARE if owner else 1  # without keys there is nobody else
        files, size = MAX_FILES // share, MAX_TOTAL_BYTES // share
        if self._num_files[owner] >= files or self._num_bytes[owner] + num_bytes > size:
            whose = "an API key" if owner else "this server"
            raise RequestError(
                f"{whose} keeps up to {files} files and {size / 2**30:g} GiB, and has as many: "
                "delete some",
                param="file",
            )
        full = self._num_files.total() >= MAX_FILES
        if full or self._num_bytes.total() + num_bytes > MAX_TOTAL_BYTES:
            raise RequestError(
                f"this server keeps up to {MAX_FILES} files and {MAX_TOTAL_BYTES >> 30} GiB of all "
                "its API keys, and has as many",
                param="file",
            )
        self._num_bytes[owner] += num_bytes

    def release(self, owner: str, num_bytes: int) -> None:
        self._num_bytes[owner] -= num_bytes

    def keep(
        self, content: Path, file_id: str, *, filename: str, purpose: Purpose, owner: str
    ) -> FileObject:
        """Make a file of what was written. That is the caller's to remove, once it need not be
        made a file of again: doing so twice is fine."""
        place = self.path(file_id)
        place.unlink(missing_ok=True)
        os.link(content, place)
        size = place.stat().st_size
        file = FileObject(file_id, size, int(time.time()), filename, purpose)
        record = Record(file, owner)
        write_whole(self._folder / f"{file_id}.json", msgspec.json.encode(record))
        self._forget(file_id)
        self._remember(record)
        return file

    def get(self, file_id: str, owner: str) -> FileObject:
        """Raises NotFound."""
        record = self._records.get(file_id)
        if record is None or record.owner != owner:
            raise NotFound(f"there is no file {file_id[:80]!r}", param="file_id")
        return record.file

    def all_of(self, owner: str) -> list[FileObject]:
        """Oldest first."""
        return [record.file for record in self._records.values() if record.owner == owner]

    def delete(self, file_id: str, owner: str) -> None:
        """Raises NotFound."""
        self.get(file_id, owner)
        self._forget(file_id)
        (self._folder / f"{file_id}.json").unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)

    def _remember(self, record: Record) -> None:
        self._records[record.file.id] = record
        self._num_files[record.owner] += 1
        self._num_bytes[record.owner] += record.file.bytes

    def _forget(self, file_id: str) -> None:
        record = self._records.pop(file_id, None)
        if record is not None:
            self._num_files[record.owner] -= 1
            self._num_bytes[record.owner] -= record.file.bytes


class Upload:
    """A file on its way in. Leaving the block without `finish` drops it."""

    def __init__(self, store: FileStore, owner: str) -> None:
        """RequestError if there is no room for another file."""
        store.reserve(owner, 0)
        self._store = store
        self._owner = owner
        self._id = new_file_id()
        self._part = store.path(self._id).with_suffix(".part")
        self._file = self._part.open("xb")
        self._reserved = 0

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.release(self._owner, self._reserved)
        self._part.unlink(missing_ok=True)  # first: on a full disk closing may fail
        self._file.close()

    def write(self, chunk: bytes) -> None:
        """RequestError once it is too large."""
        if self._reserved + len(chunk) > MAX_FILE_BYTES:
            raise RequestError(
                f"the file is larger than {MAX_FILE_BYTES} bytes: split it", param="file"
            )
        self._store.reserve(self._owner, len(chunk))
        self._reserved += len(chunk)
        self._file.write(chunk)

    def sync(self) -> None:
        """Wait until the disk has all of it. In a thread: it may take seconds."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, filename: str) -> FileObject:
        """It is all there."""
        return self._store.keep(
            self._part, self._id, filename=filename[:MAX_NAME], purpose="batch", owner=self._owner
        )


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def read_record(path: Path) -> Record:
    return msgspec.json.decode(path.read_bytes(), type=Record)
