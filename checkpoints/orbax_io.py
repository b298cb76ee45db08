"""The parameter tree in Orbax's format. Needs jax: import it only to read or write weights."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from checkpoints.errors import CheckpointError
from checkpoints.families import Leaf
from checkpoints.placing import Params, insert


def save_params(folder: Path, params: Params) -> None:
    """Write a tree of numpy arrays, each in its own type, to a folder that does not exist yet."""
    with _quiet(), ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(params))


def restore_params(
    folder: Path,
    leaves: tuple[Leaf, ...],
    dtype: np.dtype[Any],
    sharding: jax.sharding.Sharding | None,
) -> Params:
    """Read a tree, each leaf converted as it is read and put where it belongs.

    Args:
        folder: that `save_params` wrote.
        leaves: what the tree must hold, in order.
        dtype: of every leaf but norms, which are float32.
        sharding: of every leaf; None is the default device.

    Raises:
        CheckpointError: the folder is damaged, or its tree or shapes are not these leaves.
    """
    place = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    how: Params = {}
    for leaf in leaves:
        leaf_dtype = np.dtype(np.float32) if leaf.is_norm else dtype
        to_device = ocp.ArrayRestoreArgs(
            restore_type=jax.Array, dtype=leaf_dtype, sharding=place, global_shape=leaf.shape
        )
        insert(how, leaf.path, to_device)
    with _quiet(), ocp.Checkpointer(_handler(_in_flight_gb(leaves))) as checkpointer:
        try:
            _check_shapes(folder, checkpointer, leaves)
            params: Params = checkpointer.restore(
                folder.absolute(), args=ocp.args.PyTreeRestore(restore_args=how)
            )
        except CheckpointError:
            raise
        except Exception as error:  # tensorstore and Orbax raise many types for damaged files
            raise _damaged(folder, f"{type(error).__name__}: {str(error)[:300]}") from error
    for array in jax.tree.leaves(params):
        array.block_until_ready()
    return params


def _handler(in_flight_gb: int | None = None) -> ocp.PyTreeCheckpointHandler:
    # Weights do not compress, and decompressing costs more than reading what it saves.
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, use_compression=False, restore_concurrent_gb=in_flight_gb
    )


def _in_flight_gb(leaves: tuple[Leaf, ...]) -> int:
    """Room for the two largest leaves in float32: enough to keep the disk busy, far from all."""
    largest = max(math.prod(leaf.shape) for leaf in leaves)
    return 1 + math.ceil(2 * 4 * largest / 1e9)


def _check_shapes(folder: Path, checkpointer: ocp.Checkpointer, leaves: tuple[Leaf, ...]) -> None:
    """Compare what is stored with what is wanted: Orbax itself would pad and cut to fit."""
    metadata = checkpointer.metadata(folder.absolute()).item_metadata
    if metadata is None:
        raise _damaged(folder, "no tree that Orbax can read")
    stored = {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(entry.shape)
        for path, entry in jax.tree_util.tree_flatten_with_path(metadata.tree)[0]
    }
    wanted = {".".join(map(str, leaf.path)): leaf.shape for leaf in leaves}
    for path in sorted(stored.keys() | wanted.keys()):
        if stored.get(path) != wanted.get(path):
            raise CheckpointError(
                f"array {path}",
                file=folder,
                expected=wanted.get(path, "no such array"),
                found=stored.get(path, "no such array"),
                remedy="Weights and manifest are of different models: pull the model again.",
            )


def _damaged(folder: Path, found: str) -> CheckpointError:
    return CheckpointError(
        "cannot be restored",
        file=folder,
        expected="a complete Orbax checkpoint",
        found=found,
        remedy="Delete the model's folder and pull it again.",
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax's log lines and warnings from the user: what matters is raised."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
