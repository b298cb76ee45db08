"""Attention over a paged cache: one function for every dialect, and the plan of a step for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cpu
from pallas_kernels.check import check_pages, check_queries, check_settings
from pallas_kernels.launch_plan import LaunchPlan, plan_launch
from pallas_kernels.mosaic import shape as mosaic_shape
from pallas_kernels.mosaic.support import check_mosaic
from pallas_kernels.native.attention import paged_attention_native
from pallas_kernels.operands import CacheRefs
from pallas_kernels.reference import paged_attention_reference
from pallas_kernels.rope import Rope, apply_rope
from pallas_kernels.target import Target
from pallas_kernels.tuned import piece_rows, tile

AttentionPlan = cpu.AttentionPlan | LaunchPlan | None
"""What a dialect wants to know of a step before its first layer."""


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    row_start: jax.Array,
    kv_len: jax.Array,
    *,
    target: Target,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    plan: AttentionPlan = None,
    rope: Rope | None = None,
) -> jax.Array:
    """Causal attention of packed query tokens over the pages of their rows.

    The tokens of a row are the *last* ones of its `kv_len` (bottom-right causal). Only a row's
    first `kv_len` cache positions are read: whatever else the pages hold, NaN included, has no
    influence. A row's result is the same bits whatever its neighbours and its pages' numbers.

    Args:
        q: [T, H, D], float. Row r owns tokens row_start[r]:row_start[r + 1].
        k_pages: [N, B, K, D] in q's dtype or int8; query head h reads KV head h // (H // K).
        v_pages: like k_pages.
        page_table: i32[R, P]; page j of row r holds its tokens [j * B, (j + 1) * B).
        row_start: i32[R + 1], from 0 up to at most T.
        kv_len: i32[R], tokens of the row in the cache, this step's included. 0: empty row.
        target: which version of the kernel.
        scale: factor on q.k before the softmax.
        window: a query sees this many tokens, itself included. None: all before it.
        soft_cap: c in c * tanh(score / c), the bound of scores. None: unbounded.
        k_scale: f32[N, B, K], what each head of each int8 key was divided by.
        v_scale: the same for values.
        plan: from `plan_attention` for these rows and this target; None makes one.
        rope: the queries are turned by this first. None: they are, as the keys in the cache.

    Returns:
        [T, H, D] in q's dtype. Tokens that no row owns (padding) have no meaning, nor need they be
        finite.

    Raises:
        ValueError: the operands do not fit together; the message has both sides.
    """
    check_pages((k_pages, v_pages, k_scale, v_scale))
    check_queries(q, k_pages, page_table, row_start, kv_len)
    check_settings(window, soft_cap)
    settings: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap}
    lengths: dict[str, Any] = {"row_start": row_start, "kv_len": kv_len}
    cache: dict[str, Any] = {"k_pages": k_pages, "v_pages": v_pages, "page_table": page_table}
    cache |= {"k_scale": k_scale, "v_scale": v_scale}
    if target.dialect == "native":
        return paged_attention_native(q, **cache, **lengths, **settings, rope=rope)
    q = q if rope is None else apply_rope(q, rope)
    if target.dialect == "reference":
        return paged_attention_reference(q, **cache, **lengths, **settings)
    if plan is None:
        plan = plan_attention(
            row_start,
            kv_len,
            target=target,
            num_tokens=q.shape[0],
            num_heads=q.shape[1],
            pages=k_pages,
            page_table=page_table,
            dtype=q.dtype,
        )
    if target.dialect == "cpu":
        assert isinstance(plan, cpu.AttentionPlan)
        return cpu.paged_attention_cpu(q, **cache, **lengths, plan=plan, **settings)
    assert isinstance(plan, LaunchPlan)
    refs = CacheRefs(k_pages, v_pages, k_scale, v_scale, page_table)
    work = {**lengths, "plan": plan, **settings, "interpret": target.interpret}
    # Imported where they are used: a jax without the dialect still runs everything else.
    if target.dialect == "mosaic":
        check_mosaic(q.shape[1], q.dtype, k_pages)
        from pallas_kernels.mosaic.attention import paged_attention_mosaic

        return paged_attention_mosaic(q, refs, **work)
    from pallas_kernels.triton.attention import paged_attention_triton

    return paged_attention_triton(q, refs, **work, card=target.card)


def plan_attention(
    row_start: jax.Array,
    kv_len: jax.Array,
    *,
    target: Target,
    num_tokens: int,
    num_heads: int,
    pages: jax.Array,
    page_table: jax.Array,
    dtype: jnp.dtype,
) -> AttentionPlan:
    """What all layers of a step share, made on the device from lengths and the page table.

    Args:
        row_start: i32[R + 1]. kv_len: i32[R]. As in `paged_attention`.
        target: which version of the kernel.
        num_tokens: T. num_heads: H.
        pages: any layer's keys, for their shape [N, B, K, D].
        page_table: i32[R, P].
        dtype: of the queries.
    """
    if target.dialect in ("reference", "native"):
        return None
    if target.dialect == "cpu":
        return cpu.plan_attention(row_start, kv_len, num_tokens)
    page_size, num_kv_heads, head_dim = pages.shape[1:]
    group = num_heads // num_kv_heads
    if target.dialect == "mosaic":
        check_mosaic(num_heads, dtype, pages)
        query_block = mosaic_shape.query_block(group, head_dim)
        rows = mosaic_shape.piece_rows(group, head_dim)
    else:
        itemsize = jnp.dtype(dtype).itemsize
        query_block = tile(target.card, head_dim, group, "prefill", itemsize).query_block
        rows = piece_rows(group)
    return plan_launch(
        row_start,
        kv_len,
        page_table,
        num_tokens=num_tokens,
        page_size=page_size,
        query_block=query_block,
        piece_rows=rows,
    )
