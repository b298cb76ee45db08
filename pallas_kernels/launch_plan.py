"""Which program of a GPU kernel works on what: made once a step, on the device, from lengths."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.shared_pages import split_leaders

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
        piece_rows: i32[W, C], the same splits once more, but those that up to C rows keep in the
            same pages as one piece: its rows, from the front; -1 is none.
        piece_split: i32[W], which of its rows' splits each piece is.
        num_pieces: i32[1], how many of the W there are.
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
    piece_rows: jax.Array
    piece_split: jax.Array
    num_pieces: jax.Array
    row_splits: jax.Array
    row_split_len: jax.Array
    query_block: int = field(metadata={"static": True})
    max_splits: int = field(metadata={"static": True})


def plan_launch(
    row_start: jax.Array,
    kv_len: jax.Array,
    page_table: jax.Array,
    *,
    num_tokens: int,
    page_size: int,
    query_block: int,
    piece_rows: int,
) -> LaunchPlan:
    """Cut a step into tiles and splits.

    Args:
        row_start: i32[R + 1]. kv_len: i32[R]. page_table: i32[R, P]. As in
            `reference.paged_attention_reference`.
        num_tokens: T. page_size: B.
        query_block: positions per tile.
        piece_rows: C, the most decodes that may share the reading of a split.
    """
    num_rows, max_pages = page_table.shape
    num_q = row_start[1:] - row_start[:-1]
    start = kv_len - num_q
    first_tile = start // query_block
    tiles = jnp.where(num_q > 1, (kv_len - 1) // query_block - first_tile + 1, 0)
    # Every row with a chunk may touch one tile more on either side than its tokens fill.
    most_tiles = num_tokens // query_block + 2 * min(num_rows, num_tokens // 2)
    tile_row, nth_tile, num_tiles = _lay_out(tiles, max(1, most_tiles))

    max_splits = min(MAX_SPLITS, -(-max_pages * page_size // MIN_SPLIT))
    split_len = split_length(kv_len)
    splits = jnp.where(num_q == 1, -(-kv_len // split_len), 0)
    split_row, split_index, num_splits = _lay_out(splits, num_rows * max_splits)
    pieces = split_row[:, None], split_index, num_splits
    if min(num_rows, piece_rows) > 1 and SPLIT_GRAIN % page_size == 0:
        sizes = {"page_size": page_size, "max_splits": max_splits}
        leaders = split_leaders(page_table, kv_len, split_len, num_q == 1, **sizes)
        pieces = _lay_out_pieces(splits, leaders, min(num_rows, piece_rows))
    return LaunchPlan(
        tile_row=tile_row,
        tile_start=(first_tile[tile_row] + nth_tile) * query_block,
        num_tiles=num_tiles,
        split_row=split_row,
        split_index=split_index,
        num_splits=num_splits,
        piece_rows=pieces[0],
        piece_split=pieces[1],
        num_pieces=pieces[2],
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


def _lay_out_pieces(
    splits: jax.Array, leaders: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pieces of up to `size` rows with the same leader, those of one split next to each other, so
    that what one reads the next ones find in the cache of the chip.

    Args:
        splits: i32[R], of each row. leaders: i32[R, S], see `split_leaders`.

    Returns:
        `piece_rows`, `piece_split` and `num_pieces` of a `LaunchPlan`.
    """
    num_rows, max_splits = leaders.shape
    row = jnp.arange(num_rows, dtype=jnp.int32)
    split = jnp.arange(max_splits, dtype=jnp.int32)
    live = split[None] < splits[:, None]  # [R, S]
    led = (leaders[None] == row[:, None, None]) & live[None]  # [R, R, S]: by each row, each one
    followers = jnp.sum(led, axis=1, dtype=jnp.int32)  # [R, S]
    with_it = (leaders[:, None] == leaders[None]) & live[:, None] & live[None]
    earlier = row[:, None] < row[None]
    rank = jnp.sum(with_it & earlier[:, :, None], axis=0, dtype=jnp.int32)  # [R, S]

    counts = -(-followers // size)
    end = jnp.cumsum(counts.T.reshape(-1), dtype=jnp.int32)  # split by split, in each by leader
    first = (end.reshape(max_splits, num_rows).T - counts)[leaders, split[None]]
    most = num_rows * max_splits
    piece = jnp.where(live, first + rank // size, most)
    rows = jnp.full((most, size), -1, jnp.int32)
    rows = rows.at[piece, rank % size].set(row[:, None], mode="drop")
    piece_split = jnp.zeros(most, jnp.int32).at[piece].set(split[None], mode="drop")
    return rows, piece_split, end[-1:]
