"""Attention of prompts and chunks of them: a program takes a tile of one row's queries."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.costs import prefill_cost
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
    Tile,
    load_queries,
    query_of_lane,
    store_queries,
    tile_of,
    tile_types,
)
from pallas_kernels.mosaic.shape import Shape
from pallas_kernels.operands import CacheRefs, Keys


def attend_tiles(
    q: jax.Array,
    cache: CacheRefs,
    row_start: jax.Array,
    kv_len: jax.Array,
    plan: LaunchPlan,
    shape: Shape,
    *,
    interpret: bool,
) -> jax.Array:
    """[T, K, G, D]: attention of rows with more than one token; anything for other tokens.

    Args:
        q: [T, K, G, D]. The rest as in `paged_attention`, `cache` holding arrays.
    """
    lengths = (row_start, kv_len, plan.tile_row, plan.tile_start, plan.num_tiles)
    return launch(
        partial(prefill_attention, shape, interpret),
        name="prefill_attention",
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch=(
            ring_types(shape, q.dtype),
            tile_types(shape, q.dtype),
            plgpu.Barrier(num_arrivals=shape.queries, num_barriers=shape.warpgroups),
            plgpu.Barrier(num_arrivals=shape.warpgroups),
        ),
        grid={"head": q.shape[1], "tile": plan.tile_row.shape[0]},
        warpgroups=shape.warpgroups + 1,
        cost=prefill_cost(q, cache),
        interpret=interpret,
    )(q, cache, lengths)


def prefill_attention(
    shape: Shape,
    interpret: bool,
    q_ref: Any,
    cache: CacheRefs,
    lengths: Any,
    out_ref: Any,
    ring: Ring,
    tiles: Tile,
    loaded: Any,
    cleaned: Any,
) -> None:
    """Refs: q and out [T, K, G, D]; the others as `attend_tiles` passes them."""
    row_start_ref, kv_len_ref, tile_row_ref, tile_start_ref, num_tiles_ref = lengths
    head, nth = lax.axis_index("head"), lax.axis_index("tile")
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(nth < num_tiles_ref[0])
    def run() -> None:
        row, start = tile_row_ref[nth], tile_start_ref[nth]
        length = kv_len_ref[row]
        last = jnp.minimum(start + shape.warpgroups * shape.queries, length)
        first = jnp.int32(0)
        if shape.window is not None:
            first = jnp.maximum(start + 1 - shape.window, 0)
        turns = (lax.div(first, shape.keys), pl.cdiv(last, shape.keys))
        keys = Keys(row, head, length, *turns)

        @pl.when(warpgroup == shape.warpgroups)
        def produce() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            drain_ring(ring, shape, fill_ring(cache, keys, ring, shape, jnp.int32(0)))

        @pl.when(warpgroup < shape.warpgroups)
        def compute() -> None:
            plgpu.set_max_registers(shape.registers, action="increase")
            tile = tile_of(tiles, warpgroup)
            first = start + warpgroup * shape.queries
            begin, stop = row_start_ref[row], row_start_ref[row + 1]
            start_token = first + stop - length

            def source(nth: jax.Array) -> Any:
                """Of what the row does not own another of its queries."""
                return q_ref.at[jnp.clip(start_token + nth, begin, stop - 1), head]

            def target(nth: jax.Array) -> tuple[Any, jax.Array]:
                token = start_token + nth
                return out_ref.at[token, head], (token >= begin) & (token < stop)

            load_queries(source, tile, loaded.at[warpgroup], shape)
            position = first + query_of_lane(shape)
            between = (first, first + shape.queries - 1)
            done = attend(
                tile.q,
                position,
                between,
                keys,
                ring,
                cleaned,
                shape,
                jnp.int32(0),
                interpret=interpret,
            )
            # To the compiler another one: it would hold all addresses in registers till here.
            tile = tile_of(tiles, lax.optimization_barrier(warpgroup))
            store_queries(done.normalised(), target, tile.staged, shape)
