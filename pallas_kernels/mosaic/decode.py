"""Attention of decodes: a row's keys are split over programs, and what they find is merged.

Flash-Decoding (Dao, Haziza, Massa & Sizov 2023) over pages. There is one program a multiprocessor;
it goes from split to split, and its producer is ahead of it all the time. The heads of a group are
the first rows of a wgmma, and the others idle: what a decode waits for is memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.costs import decode_cost
from pallas_kernels.launch_plan import LaunchPlan
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.online_softmax import attend
from pallas_kernels.mosaic.pipeline import (
    PRODUCER_REGISTERS,
    Ring,
    drain_ring,
    fill_ring,
    ring_types,
)
from pallas_kernels.mosaic.queries import (
    ROW,
    Tile,
    load_queries,
    store_queries,
    tile_of,
    tile_types,
)
from pallas_kernels.mosaic.shape import MULTIPROCESSORS, ROWS, Shape
from pallas_kernels.operands import CacheRefs, Keys


class Pieces(NamedTuple):
    """Splits of decodes, each for the rows that a program attends to at once.

    Attributes:
        rows: i32[W, C], of each piece, from the front; -1 is none.
        split: i32[W], which of its rows' splits it is.
        number: i32[1], how many of the W there are.
    """

    rows: jax.Array
    split: jax.Array
    number: jax.Array


LANES = 128
"""Threads of a warpgroup: what the merge reads at once."""


def attend_splits(
    q: jax.Array,
    cache: CacheRefs,
    row_start: jax.Array,
    kv_len: jax.Array,
    plan: LaunchPlan,
    pieces: Pieces,
    shape: Shape,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """What each split of each decode finds by itself: the first half.

    Args:
        q: [T, K, G, D]. pieces: of the plan. The rest as in `paged_attention`, `cache` holding
            arrays.

    Returns:
        f32[R, S, K, G, D'] normalised values, and f32[R, S, K, G] the log2 of their sums of
        weights; S is the plan's `max_splits`, D' a multiple of 128: places past D and splits that
        the plan does not have are not written.
    """
    num_kv_heads, group, head_dim = q.shape[1:]
    parts = (kv_len.shape[0], plan.max_splits, num_kv_heads)
    most = pieces.split.shape[0] * num_kv_heads
    # The interpreter takes its time for every program, and one has several pieces to do like that.
    workers = min(2 if interpret else MULTIPROCESSORS, most)
    return launch(
        partial(decode_attention, shape, workers, interpret),
        name="decode_attention",
        out_type=(
            jax.ShapeDtypeStruct((*parts, group, pl.cdiv(head_dim, LANES) * LANES), jnp.float32),
            jax.ShapeDtypeStruct((*parts, group), jnp.float32),
        ),
        scratch=(
            ring_types(shape, q.dtype),
            tile_types(shape, q.dtype),
            plgpu.SMEM((ROWS, shape.width), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(num_arrivals=shape.queries),
            plgpu.Barrier(),
        ),
        grid={"worker": workers},
        warpgroups=2,
        cost=decode_cost(q, cache, plan.max_splits),
        interpret=interpret,
    )(q, cache, row_start, kv_len, pieces, plan.row_split_len)


def decode_attention(
    shape: Shape,
    num_workers: int,
    interpret: bool,
    q_ref: Any,
    cache: CacheRefs,
    row_start_ref: Any,
    kv_len_ref: Any,
    pieces: Pieces,
    split_len_ref: Any,
    out_ref: Any,
    sum_ref: Any,
    ring: Ring,
    tiles: Tile,
    values: Any,
    sums: Any,
    loaded: Any,
    cleaned: Any,
) -> None:
    """Refs: q [T, K, G, D]; the others as `attend_splits` passes and returns them.

    The rows of a piece own all keys of its split, in the same pages, and see them all; so what
    holds for the first of them holds for all. It may end within the split where there is no other.
    """
    num_heads = q_ref.shape[1]
    worker, warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
    count = pl.cdiv(jnp.maximum(pieces.number[0] * num_heads - worker, 0), num_workers)

    def work(nth: jax.Array) -> tuple[Keys, jax.Array, jax.Array]:
        """The keys for one KV head, the piece, and its split. All heads of a page come together."""
        item = worker + nth * num_workers
        piece, head = lax.div(item, num_heads), lax.rem(item, num_heads)
        row, split = pieces.rows[piece, 0], pieces.split[piece]
        length, split_len = kv_len_ref[row], split_len_ref[row]
        first, stop = split * split_len, jnp.minimum((split + 1) * split_len, length)
        if shape.window is not None:
            first = jnp.maximum(first, length - shape.window)
        first, stop = lax.div(first, shape.keys), pl.cdiv(stop, shape.keys)
        return Keys(row, head, length, first, jnp.maximum(first, stop)), piece, split

    @pl.when(warpgroup == 1)
    def produce() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def one(nth: jax.Array, done: jax.Array) -> jax.Array:
            return fill_ring(cache, work(nth)[0], ring, shape, done)

        drain_ring(ring, shape, lax.fori_loop(0, count, one, jnp.int32(0)))

    @pl.when(warpgroup == 0)
    def compute() -> None:
        plgpu.set_max_registers(shape.registers, action="increase")
        tile = tile_of(tiles, warpgroup)

        def one(nth: jax.Array, done: jax.Array) -> jax.Array:
            keys, piece, split = work(nth)
            last = keys.length - 1

            def source(nth: jax.Array) -> Any:
                """For a row that there is not, the first one's query."""
                row = pieces.rows[piece, nth]
                return q_ref.at[row_start_ref[jnp.where(row < 0, keys.row, row)], keys.head]

            def target(nth: jax.Array) -> tuple[Any, jax.Array]:
                row = pieces.rows[piece, nth]
                return out_ref.at[jnp.maximum(row, 0), split, keys.head], row >= 0

            load_queries(source, tile, loaded, shape)
            position = plgpu.layout_cast(jnp.full((ROWS,), last, jnp.int32), ROW)
            found = attend(
                tile.q,
                position,
                (last, last),
                keys,
                ring,
                cleaned,
                shape,
                done,
                interpret=interpret,
            )
            store_queries(found.normalised(), target, values, shape)
            sums[...] = found.maximum + jnp.log2(jnp.where(found.total > 0, found.total, 1.0))
            plgpu.commit_smem()

            @pl.loop(0, shape.queries)
            def store(nth: jax.Array) -> None:
                row = pieces.rows[piece, nth]

                @pl.when(row >= 0)
                def owned() -> None:
                    for member in range(shape.group):
                        log_sum = sums[nth * shape.pitch + member]
                        sum_ref[row, split, keys.head, member] = log_sum

            plgpu.commit_smem()  # before any warp writes the next ones
            return done + keys.stop_turn - keys.first_turn

        lax.fori_loop(0, count, one, jnp.int32(0))
