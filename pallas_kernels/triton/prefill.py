"""Attention of prompts and chunks of them: a program takes a tile of one row's queries."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.costs import prefill_cost
from pallas_kernels.launch_plan import LaunchPlan
from pallas_kernels.operands import CacheRefs, Keys
from pallas_kernels.triton.online_softmax import Settings, attend
from pallas_kernels.tuned import Tile


def attend_tiles(
    q: jax.Array,
    cache: CacheRefs,
    row_start: jax.Array,
    kv_len: jax.Array,
    plan: LaunchPlan,
    tile: Tile,
    settings: Settings,
    *,
    interpret: bool,
) -> jax.Array:
    """[T, K, G, D]: attention of rows with more than one token; anything for other tokens.

    Args:
        q: [T, K, G, D]. The rest as in `paged_attention`, `cache` holding arrays.
    """
    num_kv_heads = q.shape[1]
    lengths = (row_start, kv_len, plan.tile_row, plan.tile_start, plan.num_tiles)
    return pl.pallas_call(
        partial(prefill_attention, settings),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_kv_heads, plan.tile_row.shape[0]),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        cost_estimate=prefill_cost(q, cache),
        interpret=interpret,
    )(q, cache, lengths)


def prefill_attention(
    settings: Settings, q_ref: Any, cache: CacheRefs, lengths: Any, out_ref: Any
) -> None:
    """Refs: q and out [T, K, G, D]; the others as `attend_tiles` passes them."""
    row_start_ref, kv_len_ref, tile_row_ref, tile_start_ref, num_tiles_ref = lengths
    head, tile = pl.program_id(0), pl.program_id(1)

    @pl.when(tile < num_tiles_ref[0])
    def run() -> None:
        row, start = tile_row_ref[tile], tile_start_ref[tile]
        length, stop = kv_len_ref[row], row_start_ref[row + 1]
        lane = jnp.arange(settings.rows, dtype=jnp.int32)
        position = start + lane // settings.group_pad
        member = lane % settings.group_pad
        token = position + (stop - length)
        live = (token >= row_start_ref[row]) & (token < stop) & (member < settings.group)
        # Masked lanes keep an index of their own: one that nothing else has, even out of range.
        token = jnp.where(live, token, q_ref.shape[0] + lane)

        dim = jnp.arange(settings.dim_pad, dtype=jnp.int32)
        index = (token[:, None], jnp.full((1, 1), head, jnp.int32), member[:, None], dim[None, :])
        mask = live[:, None] & (dim < settings.head_dim)[None, :]
        q = plgpu.load(q_ref.at[index], mask=mask, other=0)  # [M, D']

        last = jnp.minimum(start + settings.query_block, length)
        first = jnp.int32(0)
        if settings.window is not None:
            first = jnp.maximum(start + 1 - settings.window, 0)
        turns = (first // settings.keys, pl.cdiv(last, settings.keys))
        done = attend(q, position, cache, Keys(row, head, length, *turns), settings)
        plgpu.store(out_ref.at[index], done.normalised().astype(out_ref.dtype), mask=mask)
