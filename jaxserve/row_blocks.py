"""Work over rows that makes large arrays on the way, done for a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

ROWS = 64
"""Of a block. At a vocabulary of 128,256 an array of their logits is 33 MB."""

Rows = TypeVar("Rows")
Results = TypeVar("Results")


def in_row_blocks(work: Callable[[Rows], Results], rows: Rows) -> Results:
    """`work(rows)`, where it does to every row the same, in blocks of at most `ROWS`.

    What `work` decides by a condition over its rows it decides for each block.

    Args:
        work: a function of a pytree of arrays [n, ...], giving one of arrays [n, ...].
        rows: arrays [R, ...].
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    if count <= ROWS:
        return work(rows)
    # The last block ends where the rows do, and begins among those of the block before it.
    starts = jnp.minimum(jnp.arange(0, count, ROWS), count - ROWS)

    def block(start: jax.Array) -> Results:
        return work(jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, ROWS), rows))

    def joined(blocks: jax.Array) -> jax.Array:
        whole = (len(starts) - 1) * ROWS
        before = blocks[:-1].reshape(whole, *blocks.shape[2:])
        return jnp.concatenate([before, blocks[-1, whole - count :]])

    return jax.tree.map(joined, lax.map(block, starts))
