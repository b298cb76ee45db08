"""Files that clients leave here, and those that batches make: content and a record beside it."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Literal

import msgspec

from jaxserve.errors import NotFound, RequestError
from jaxserve.server.disk import write_whole

MAX_FILE_BYTES = 200 << 20
MAX_FILES = 10_000
MAX_TOTAL_BYTES = 20 << 30
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
        for part in folder.glob("*.part"):
            part.unlink()
        found = [read_record(path) for path in folder.glob("*.json")]
        for record in sorted(found, key=lambda record: record.file.created_at):
            if self.path(record.file.id).exists():
                self._records[record.file.id] = record

    def path(self, file_id: str) -> Path:
        """Where the content of a file is."""
        return self._folder / f"{file_id}.jsonl"

    def check_room(self, num_bytes: int = 0) -> None:
        """RequestError if no file, or none of so many bytes, can be taken."""
        if num_bytes > MAX_FILE_BYTES:
            raise RequestError(
                f"the file is larger than {MAX_FILE_BYTES} bytes: split it", param="file"
            )
        total = sum(record.file.bytes for record in self._records.values())
        if len(self._records) >= MAX_FILES or total + num_bytes > MAX_TOTAL_BYTES:
            raise RequestError(
                f"this server keeps up to {MAX_FILES} files and {MAX_TOTAL_BYTES >> 30} GiB, and "
                "has as many: delete some",
                param="file",
            )

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
        self._records[file_id] = record
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
        del self._records[file_id]
        (self._folder / f"{file_id}.json").unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)


class Upload:
    """A file on its way in. Leaving the block without `finish` drops it."""

    def __init__(self, store: FileStore) -> None:
        """RequestError if there is no room for another file."""
        store.check_room()
        self._store = store
        self._id = new_file_id()
        self._part = store.path(self._id).with_suffix(".part")
        self._file = self._part.open("xb")

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def write(self, chunk: bytes) -> None:
        """RequestError once it is too large."""
        self._file.write(chunk)
        self._store.check_room(self._file.tell())

    def finish(self, filename: str, owner: str) -> FileObject:
        """It is all there."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._store.keep(
            self._part, self._id, filename=filename[:MAX_NAME], purpose="batch", owner=owner
        )


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def read_record(path: Path) -> Record:
    return msgspec.json.decode(path.read_bytes(), type=Record)
