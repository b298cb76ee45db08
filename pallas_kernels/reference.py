"""The specification of every kernel: plain jnp, dense, obviously right, and slow.

Letters: T tokens, R rows, P pages a row may hold, N pages in the cache, B tokens per page,
H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def paged_attention_reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    row_start: jax.Array,
    kv_len: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of packed query tokens over the pages of their rows.

    The tokens of a row are the *last* ones of its `kv_len` (bottom-right causal). Only a row's
    first `kv_len` cache positions are read: whatever else the pages hold, NaN included, has no
    influence. Tokens that no row owns (padding) come out as zeros.

    Args:
        q: [T, H, D].
        k_pages: [N, B, K, D]; query head h reads KV head h // (H // K).
        v_pages: [N, B, K, D].
        page_table: i32[R, P]; page j of row r holds its tokens [j * B, (j + 1) * B).
        row_start: i32[R + 1]; row r owns tokens row_start[r]:row_start[r + 1].
        kv_len: i32[R], tokens of the row in the cache, this step's included. 0: empty row.
        scale: factor on q.k before the softmax.
        window: a query sees this many tokens, itself included. None: all before it.
        soft_cap: c in c * tanh(score / c), the bound of scores. None: unbounded.
        k_scale: f32[N, B, K], what each head of each int8 key was divided by. None: not quantised.
        v_scale: the same for values.

    Returns:
        [T, H, D] in q's dtype, computed in at least float32.
    """
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    dtype = q.dtype if q.dtype.itemsize > 4 else jnp.dtype(jnp.float32)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(row_start, token, side="right").astype(jnp.int32) - 1
    owned = token < row_start[-1]
    row = jnp.where(owned, row, 0)
    position = kv_len[row] - (row_start[row + 1] - token)  # i32[T]

    key_position = jnp.arange(page_table.shape[1] * page_size, dtype=jnp.int32)
    k = dequantised(k_pages, k_scale, dtype)[page_table]
    v = dequantised(v_pages, v_scale, dtype)[page_table]
    k, v = (x.reshape(-1, key_position.size, num_kv_heads, head_dim)[row] for x in (k, v))
    visible = (key_position[None] <= position[:, None]) & owned[:, None]  # [T, P * B]
    if window is not None:
        visible &= key_position[None] > position[:, None] - window
    k = jnp.where(visible[:, :, None, None], k, 0)
    v = jnp.where(visible[:, :, None, None], v, 0)
    q = q.astype(dtype).reshape(num_tokens, num_kv_heads, -1, head_dim)
    scores = jnp.einsum("tkgd,tskd->tkgs", q, k, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("tkgs,tskd->tkgd", weights, v, precision="highest")
    out = out.reshape(num_tokens, num_heads, head_dim)
    return jnp.where(owned[:, None, None], out, 0).astype(q.dtype)


def dequantised(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Keys or values [..., D] in `dtype`; scale f32[...] where they are int8."""
    return x.astype(dtype) if scale is None else x.astype(dtype) * scale[..., None].astype(dtype)


def quantised(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8[..., D] and f32[...]: each vector over a 127th of its largest element, rounded."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127.0
    divided = x / jnp.where(scale > 0, scale, 1.0)[..., None]
    # Half away from zero, because conversion cuts off: every dialect can do that.
    return (divided + jnp.where(divided > 0, 0.5, -0.5)).astype(jnp.int8), scale


def write_kv_reference(
    pages: tuple[jax.Array, ...], k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[jax.Array, ...]:
    """The cache with this step's keys and values in it.

    Args:
        pages: k and v [N, B, K, D]; of int8, then also their scales f32[N, B, K].
        k: [T, K, D]. v: the same.
        slots: i32[T], place of each token in the cache read as [N * B]; N * B drops the token.
    """

    def write(pages: jax.Array, new: jax.Array) -> jax.Array:
        flat = pages.reshape(-1, *pages.shape[2:])
        return flat.at[slots].set(new.astype(pages.dtype), mode="drop").reshape(pages.shape)

    if len(pages) == 2:
        return write(pages[0], k), write(pages[1], v)
    (k8, k_scale), (v8, v_scale) = quantised(k), quantised(v)
    return tuple(map(write, pages, (k8, v8, k_scale, v_scale)))
