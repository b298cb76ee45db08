"""Which program of a GPU kernel works on what: made once a step, on the device, from lengths."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

MIN_SPLIT = 512
"""Fewest keys of a split: partial results cost 2% of the traffic of so many keys."""
MAX_SPLITS = 32
SPLIT_GRAIN = 128
"""A split is a multiple of this, which is a multiple of the keys a kernel takes a turn."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LaunchPlan:
    """The work of a step. Rows with one token are decodes; the others are cut into tiles.

    A tile is `query_block` consecutive positions of one row, aligned in the row and not in the
    step: a position has the same neighbours in whichever chunk it comes. A split is a range of a
    decode's keys that depends on nothing but the row's own length. So nothing that a kernel sums
    up depends on the rest of the batch.

    Attributes:
        tile_row: i32[M], row of each tile; M is the most there can be.
        tile_start: i32[M], first position of each tile.
        num_tiles: i32[1], how many of the M there are.
        split_row: i32[W], row of each split; W is R times the most splits of a row.
        split_index: i32[W], which of its row's splits it is.
        num_splits: i32[1], how many of the W there are.
        row_splits: i32[R], splits of each row; 0 for rows that do not decode.
        row_split_len: i32[R], keys per split of each row.
        query_block: positions per tile.
        max_splits: most splits of a row.
    """

    tile_row: jax.Array
    tile_start: jax.Array
    num_tiles: jax.Array
    split_row: jax.Array
    split_index: jax.Array
    num_splits: jax.Array
    row_splits: jax.Array
    row_split_len: jax.Array
    query_block: int = field(metadata={"static": True})
    max_splits: int = field(metadata={"static": True})


def plan_launch(
    row_start: jax.Array,
    kv_len: jax.Array,
    *,
    num_tokens: int,
    max_kv_len: int,
    query_block: int,
) -> LaunchPlan:
    """Cut a step into tiles and splits.

    Args:
        row_start: i32[R + 1]. kv_len: i32[R]. As in `reference.paged_attention_reference`.
        num_tokens: T.
        max_kv_len: the most keys a row may have, P * B.
        query_block: positions per tile.
    """
    num_rows = kv_len.shape[0]
    num_q = row_start[1:] - row_start[:-1]
    start = kv_len - num_q
    first_tile = start // query_block
    tiles = jnp.where(num_q > 1, (kv_len - 1) // query_block - first_tile + 1, 0)
    # Every row with a chunk may touch one tile more on either side than its tokens fill.
    most_tiles = num_tokens // query_block + 2 * min(num_rows, num_tokens // 2)
    tile_row, nth_tile, num_tiles = _lay_out(tiles, max(1, most_tiles))

    max_splits = min(MAX_SPLITS, -(-max_kv_len // MIN_SPLIT))
    split_len = split_length(kv_len)
    splits = jnp.where(num_q == 1, -(-kv_len // split_len), 0)
    split_row, split_index, num_splits = _lay_out(splits, num_rows * max_splits)
    return LaunchPlan(
        tile_row=tile_row,
        tile_start=(first_tile[tile_row] + nth_tile) * query_block,
        num_tiles=num_tiles,
        split_row=split_row,
        split_index=split_index,
        num_splits=num_splits,
        row_splits=splits,
        row_split_len=split_len,
        query_block=query_block,
        max_splits=max_splits,
    )


def split_length(kv_len: jax.Array) -> jax.Array:
    """Keys per split of a row of so many: as short as `MIN_SPLIT` and `MAX_SPLITS` allow."""
    grains = -(-kv_len // (MAX_SPLITS * SPLIT_GRAIN))
    return jnp.maximum(MIN_SPLIT, grains * SPLIT_GRAIN)


def _lay_out(counts: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row by row, `counts` i32[R] pieces each: row and number i32[size] of each, and how many."""
    end = jnp.cumsum(counts, dtype=jnp.int32)
    piece = jnp.arange(size, dtype=jnp.int32)
    # One fused comparison: a binary search is a loop of little kernels on a GPU.
    row = jnp.searchsorted(end, piece, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, counts.shape[0] - 1)
    return row, piece - (end - counts)[row], end[-1:]
