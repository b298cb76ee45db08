"""Published tensors -> leaves of the parameter tree, audited and fused, one at a time, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.families import Leaf, Names, Part
from checkpoints.tensor_files import Array, TensorFiles

# Rows converted at a time: bounds the float32 copy of a quantised embedding to some tens of MB.
_ROWS = 4096

FLOAT32 = np.dtype(np.float32)


def audit(leaves: tuple[Leaf, ...], names: Names, files: TensorFiles) -> None:
    """Check that the files hold each part in its shape, and nothing that no leaf wants.

    Raises:
        CheckpointError: names the file and the tensor that is missing, misshapen or left over.
    """
    present = set(files.names())
    wanted: set[str] = set()
    for leaf in leaves:
        for part in leaf.parts:
            wanted.add(part.name)
            _check_part(part, present, names, files)
    for name in sorted(present - wanted):
        if name == names.top["head"]:
            _check_head_is_embedding(names, files)
        elif not name.endswith(names.ignored):
            raise CheckpointError(
                f"tensor {name} has no place in this model",
                file=files.file_of(name),
                expected="only tensors that the config accounts for",
                found=f"one of shape {files.shape(name)}",
                remedy="Loading without it would give wrong answers: check the config.",
            )


def _check_part(part: Part, present: set[str], names: Names, files: TensorFiles) -> None:
    if part.name not in present:
        is_head = part.name == names.top["head"]
        raise CheckpointError(
            f"tensor {part.name} is missing",
            file=files.file_of(part.name),
            expected=f"shape {part.shape}",
            remedy='If the output head is the embedding, the config must say "tie_word_embeddings":'
            " true."
            if is_head
            else "The files are incomplete or do not fit the config.",
        )
    if files.shape(part.name) != part.shape:
        raise CheckpointError(
            f"tensor {part.name} has the wrong shape",
            file=files.file_of(part.name),
            expected=part.shape,
            found=files.shape(part.name),
            remedy="The config and the weights belong to different models.",
        )


def _check_head_is_embedding(names: Names, files: TensorFiles) -> None:
    """A tied model may ship its head too, as long as both say the same."""
    embed, head = names.top["embed"], names.top["head"]
    same = files.shape(embed) == files.shape(head) and all(
        np.array_equal(files.rows(embed, i, i + _ROWS), files.rows(head, i, i + _ROWS))
        for i in range(0, files.shape(embed)[0], _ROWS)
    )
    if not same:
        raise CheckpointError(
            f"tensor {head} differs from {embed}",
            file=files.file_of(head),
            expected="the same values, because the config says that the head is tied",
            remedy='If the head is a matrix of its own, set "tie_word_embeddings": false.',
        )


def stored_dtype(leaf: Leaf, files: TensorFiles) -> np.dtype[Any]:
    """The type that keeps a leaf's published values exactly: its own, or float32."""
    dtypes = {files.dtype(part.name) for part in leaf.parts}
    return dtypes.pop() if len(dtypes) == 1 and not leaf.is_norm else FLOAT32


def read_leaf(
    leaf: Leaf,
    names: Names,
    files: TensorFiles,
    dtype: np.dtype[Any],
    *,
    allocate: Callable[[tuple[int, ...], np.dtype[Any]], Array] = np.empty,
) -> Array:
    """Read one leaf in `dtype` (norms: float32), its parts stacked and put in our order.

    Args:
        allocate: makes the array to fill, of `leaf.shape`.
    """
    array = allocate(leaf.shape, FLOAT32 if leaf.is_norm else dtype)
    start = 0
    for part in leaf.parts:
        stop = start + part.shape[0]
        _read_part(part, files, array[start:stop])
        start = stop
    if leaf.is_norm:
        array += np.float32(names.norm_offset)
    return array


def _read_part(part: Part, files: TensorFiles, target: Array) -> None:
    if part.heads:
        source = files.rows(part.name, 0, part.shape[0])
        target[...] = _unpermute(source, part.heads)
        return
    for i in range(0, part.shape[0], _ROWS):
        target[i : i + _ROWS] = files.rows(part.name, i, i + _ROWS)


def _unpermute(rows: Array, heads: int) -> Array:
    """Back from pairs (0, D/2), (1, D/2 + 1), ... to halves, within each head."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
