"""Paged attention in Pallas' Triton dialect: tiles of prompts, splits of decodes, one plan."""

from __future__ import annotations

import jax

from pallas_kernels.launch_plan import LaunchPlan
from pallas_kernels.operands import CacheRefs
from pallas_kernels.triton.decode import attend_splits, merge_splits
from pallas_kernels.triton.online_softmax import Settings
from pallas_kernels.triton.prefill import attend_tiles
from pallas_kernels.tuned import PROGRAMS, Tile, padded_size, tile


def paged_attention_triton(
    q: jax.Array,
    cache: CacheRefs,
    row_start: jax.Array,
    kv_len: jax.Array,
    plan: LaunchPlan,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    card: str,
    interpret: bool,
) -> jax.Array:
    """`paged_attention`, validated; what comes out for padding is whatever was there."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[2]
    group = num_heads // num_kv_heads
    sizes = (card, head_dim, group)
    prefill = tile(*sizes, "prefill", q.dtype.itemsize)._replace(query_block=plan.query_block)
    decode = tile(*sizes, "decode", q.dtype.itemsize)

    def settings(sizes: Tile) -> Settings:
        pads = (padded_size(group), head_dim, max(16, padded_size(head_dim)))
        return Settings(
            scale, window, soft_cap, group, *pads, query_block=sizes.query_block, keys=sizes.keys
        )

    grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim)
    lengths = (row_start, kv_len, plan)
    out = grouped  # one token is a decode, or padding
    if num_tokens > 1:
        tiles = settings(prefill)
        out = attend_tiles(grouped, cache, *lengths, prefill, tiles, interpret=interpret)
    found = attend_splits(
        grouped,
        cache,
        *lengths,
        decode,
        settings(decode),
        num_programs=PROGRAMS[card],
        interpret=interpret,
    )
    return merge_splits(out, *found, row_start, plan, interpret=interpret).reshape(q.shape)
