"""Lists in pieces, as OpenAI has them: each goes on after the last item of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from jaxserve.errors import RequestError
from jaxserve.server.batch_store import Batch
from jaxserve.server.file_store import FileObject
from jaxserve.server.limits import within

Order = Literal["asc", "desc"]


class FileQuery(msgspec.Struct, frozen=True):
    """Which files: `limit` of them, after the one of this id, oldest or newest first."""

    limit: int | None = None
    after: str | None = None
    order: Order | None = None
    purpose: str | None = None


class BatchQuery(msgspec.Struct, frozen=True):
    """Which batches: `limit` of them, after the one of this id."""

    limit: int | None = None
    after: str | None = None


class FileList(msgspec.Struct, frozen=True):
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class BatchList(msgspec.Struct, frozen=True):
    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


Item = TypeVar("Item", FileObject, Batch)


def file_list(files: Sequence[FileObject], query: FileQuery) -> FileList:
    """`files` is oldest first. RequestError for a limit or an id that is not there."""
    chosen = [file for file in files if query.purpose in (None, file.purpose)]
    if query.order != "asc":
        chosen.reverse()
    limit = within("limit", query.limit, 1, 10_000, default=10_000)
    return FileList(*piece(chosen, query.after, limit))


def batch_list(batches: Sequence[Batch], query: BatchQuery) -> BatchList:
    """`batches` is oldest first. RequestError for a limit or an id that is not there."""
    limit = within("limit", query.limit, 1, 100, default=20)
    return BatchList(*piece(batches[::-1], query.after, limit))


def piece(
    items: Sequence[Item], after: str | None, limit: int
) -> tuple[list[Item], bool, str | None, str | None]:
    """Some of the items, whether there are more, and the ids of the first and the last."""
    start = 0
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise RequestError(f"after is {after[:80]!r}, which is not in the list", param="after")
        start = ids.index(after) + 1
    data = list(items[start : start + limit])
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return data, start + limit < len(items), first, last
