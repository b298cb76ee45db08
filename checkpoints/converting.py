"""A published checkpoint -> the files of a model folder in the store."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpoints.catalogue import CatalogueEntry
from checkpoints.checkpoint import ProgressFn, PublishedCheckpoint, num_values
from checkpoints.leaves import read_leaf, stored_dtype
from checkpoints.manifest import Manifest, write_manifest, write_tokenizer
from checkpoints.model_config import TokenizerSpec
from checkpoints.pulled import PARAMS_NAME, canonical_leaves
from checkpoints.tensor_files import Array

if TYPE_CHECKING:
    from checkpoints.placing import Params


def convert(
    published: PublishedCheckpoint,
    folder: Path,
    name: str,
    origin: str,
    entry: CatalogueEntry | None,
    progress: ProgressFn,
) -> None:
    """Write a published model's files.

    Weights keep the precision they were published in; what was quantised becomes float32.

    Args:
        published: what to convert.
        folder: exists and is empty.
        name, origin, entry: for the manifest.
        progress: called with values converted and values to convert.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    params = _fuse(published, scratch, progress)
    manifest = Manifest(
        name=name,
        source=origin,
        sha256=entry.sha256 if entry else None,
        licence=entry.licence if entry else None,
        config=published.config,
        num_leaves=len(canonical_leaves(published.config)),
        has_tokenizer=published.tokenizer is not None,
    )
    progress("writing the model", 0, 0)
    write_model(folder, params, manifest, published.tokenizer)
    del params
    shutil.rmtree(scratch)
    sync(folder)


def write_model(
    folder: Path, params: Params, manifest: Manifest, tokenizer: TokenizerSpec | None
) -> None:
    """Write weights, tokenizer and manifest, the manifest last, and have the disk keep them.

    Args:
        folder: exists and holds no model.
        params: the parameter tree, as numpy or jax arrays.
        manifest, tokenizer: what the weights are of.
    """
    from checkpoints.orbax_io import save_params

    save_params(folder / PARAMS_NAME, params)
    _sync_tree(folder / PARAMS_NAME)
    if tokenizer is not None:
        write_tokenizer(folder, tokenizer)
    write_manifest(folder, manifest)


def _fuse(published: PublishedCheckpoint, scratch: Path, progress: ProgressFn) -> Params:
    """The parameter tree in mapped files, so that a model larger than memory can be converted."""
    from checkpoints.placing import insert

    leaves, files = published.open_leaves()
    total, done = sum(map(num_values, leaves)), 0
    params: Params = {}

    def map_file(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        file = scratch / str(done)
        return np.asarray(np.memmap(file, dtype=dtype, mode="w+", shape=shape))

    for leaf in leaves:
        progress("converting weights", done, total)
        dtype = stored_dtype(leaf, files)
        insert(
            params,
            leaf.path,
            read_leaf(leaf, published.names, files, dtype, allocate=map_file),
        )
        done += num_values(leaf)
    progress("converting weights", done, total)
    return params


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent) / name)
        sync(Path(parent))


def sync(path: Path) -> None:
    """Have the disk keep a folder's list of names (or a file's content)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
