"""Paged attention in Pallas' Mosaic GPU dialect, for Hopper: TMA, wgmma, one warpgroup fetching."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.launch_plan import LaunchPlan
from pallas_kernels.mosaic.decode import Pieces, attend_splits
from pallas_kernels.mosaic.merge import merge_splits
from pallas_kernels.mosaic.prefill import attend_tiles
from pallas_kernels.mosaic.shape import Shape, queries, sizes
from pallas_kernels.operands import CacheRefs
from pallas_kernels.tuned import Phase


# One function of the program for all layers with the same settings: lowered once.
@partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "interpret"))
def paged_attention_mosaic(
    q: jax.Array,
    cache: CacheRefs,
    row_start: jax.Array,
    kv_len: jax.Array,
    plan: LaunchPlan,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    interpret: bool,
) -> jax.Array:
    """`paged_attention`, validated; what comes out for padding is whatever was there."""
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = cache.k.shape[1:3]
    group = num_heads // num_kv_heads

    pieces = Pieces(plan.piece_rows, plan.piece_split, plan.num_pieces)
    if window is not None:  # what one shows of a split is another part for rows of another length
        pieces = Pieces(plan.split_row[:, None], plan.split_index, plan.num_splits)

    def shape(phase: Phase, queries: int) -> Shape:
        layer = (scale, window, soft_cap, group, head_dim, page_size)
        warpgroups, keys, turns = sizes(phase, head_dim)
        return Shape(*layer, warpgroups, queries, keys, turns)

    prefill = shape("prefill", queries(group, head_dim))
    decode = shape("decode", pieces.rows.shape[1])
    grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim)
    lengths = (row_start, kv_len, plan)
    out = attend_tiles(grouped, cache, *lengths, prefill, interpret=interpret)
    found = attend_splits(grouped, cache, *lengths, pieces, decode, interpret=interpret)
    return merge_splits(out, *found, row_start, plan, interpret=interpret).reshape(q.shape)
