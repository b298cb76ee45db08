"""Paged attention for CPUs in plain jnp: work in proportion to the live context.

Two passes share one online softmax. Decode rows, longest first, go in blocks of DECODE_ROWS, each
block looping over as many pages as its longest row holds. Rows with more tokens (prefill chunks)
go in blocks of up to QUERY_BLOCK queries of one row, each looping from the first page its window
reaches to the last page it may see. All trip counts are dynamic: a row of 100 tokens costs the
same whether the page table has room for 200 or for 100,000.

Within a row the pages are always visited in the same order and in the same groups, so a row's
result does not depend on its neighbours, beyond what the shapes of the dots do to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reference import dequantised

DECODE_ROWS = 8
DECODE_PAGES = 4
QUERY_BLOCK = 64
QUERY_PAGES = 8
MASKED = -1e30  # finite: a row that sees nothing yet must not turn into NaN


class Cache(NamedTuple):
    """One layer's pages: k, v [N, B, K, D]; where they are int8, their scales f32[N, B, K]."""

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None


class AttentionPlan(NamedTuple):
    """Which rows and queries go together. Depends on lengths alone: made once a step.

    Attributes:
        row_ids: i32[T], row of each token; padding has some row or other.
        decode_order: i32[R'], rows by falling decode length; R' is R rounded up to whole blocks.
        decode_rank: i32[R], where each row stands in `decode_order`.
        decode_len: i32[R'], kv_len in that order; 0 for rows that do not decode.
        decode_blocks: i32[], blocks of rows with anything to do.
        is_decode: bool[T].
        query_row: i32[M], row of each query block. M is the most there can be.
        query_start: i32[M], first token of each query block.
        query_blocks: i32[], how many of the M there are.
    """

    row_ids: jax.Array
    decode_order: jax.Array
    decode_rank: jax.Array
    decode_len: jax.Array
    decode_blocks: jax.Array
    is_decode: jax.Array
    query_row: jax.Array
    query_start: jax.Array
    query_blocks: jax.Array


def plan_attention(row_start: jax.Array, kv_len: jax.Array, num_tokens: int) -> AttentionPlan:
    """Group the rows of a step. Args as in `reference.paged_attention_reference`."""
    num_rows = kv_len.shape[0]
    num_q = row_start[1:] - row_start[:-1]
    decodes = num_q == 1
    decode_len = jnp.where(decodes, kv_len, 0)
    order = jnp.argsort(-decode_len).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(num_rows, dtype=jnp.int32))
    pad = -num_rows % decode_block(num_rows)
    order = jnp.pad(order, (0, pad))

    per_row = jnp.where(decodes, 0, -(-num_q // query_block(num_tokens)))
    block_end = jnp.cumsum(per_row, dtype=jnp.int32)
    block = jnp.arange(num_tokens // query_block(num_tokens) + num_rows, dtype=jnp.int32)
    query_row = jnp.searchsorted(block_end, block, side="right").astype(jnp.int32)
    query_row = jnp.minimum(query_row, num_rows - 1)
    nth = block - (block_end - per_row)[query_row]

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row_ids = jnp.searchsorted(row_start, token, side="right").astype(jnp.int32) - 1
    row_ids = jnp.minimum(row_ids, num_rows - 1)
    return AttentionPlan(
        row_ids=row_ids,
        decode_order=order,
        decode_rank=rank,
        decode_len=jnp.pad(decode_len[order[:num_rows]], (0, pad)),
        decode_blocks=-(-jnp.sum(decodes, dtype=jnp.int32) // decode_block(num_rows)),
        is_decode=decodes[row_ids],
        query_row=query_row,
        query_start=row_start[query_row] + nth * query_block(num_tokens),
        query_blocks=block_end[-1],
    )


def decode_block(num_rows: int) -> int:
    """Decoding rows per block: never more than the step has rows."""
    return min(DECODE_ROWS, num_rows)


def query_block(num_tokens: int) -> int:
    """Queries per block: never more than the step has tokens."""
    return min(QUERY_BLOCK, num_tokens)


def paged_attention_cpu(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    row_start: jax.Array,
    kv_len: jax.Array,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """`reference.paged_attention_reference`, given the plan of the step; padding is unspecified."""
    cache, seen = Cache(k_pages, v_pages, k_scale, v_scale), (window, soft_cap)
    grouped = (q * jnp.asarray(scale, q.dtype)).reshape(
        q.shape[0], k_pages.shape[2], -1, q.shape[2]
    )
    decoded = _attend_decodes(grouped, cache, page_table, row_start, plan, *seen)
    if q.shape[0] == 1:
        return decoded.reshape(q.shape)
    chunked = _attend_chunks(grouped, cache, page_table, row_start, kv_len, plan, *seen)
    by_token = decoded[plan.decode_rank[plan.row_ids]]
    return jnp.where(plan.is_decode[:, None, None, None], by_token, chunked).reshape(q.shape)


def _attend_decodes(
    q: jax.Array,
    cache: Cache,
    page_table: jax.Array,
    row_start: jax.Array,
    plan: AttentionPlan,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """[R', K, G, D]: one query per decoding row, in `decode_order`.

    A row's heads are laid out block-diagonally, [H, K * D], so that keys and values are used as
    they lie in their pages: the multiplications with zeros are cheaper on a CPU than transposing
    what was gathered, by a third of all attention.
    """
    num_kv_heads, group, head_dim = q.shape[1:]
    own_head = jnp.eye(num_kv_heads, dtype=q.dtype)[None, :, None, :, None]
    tokens = jnp.minimum(row_start[plan.decode_order], q.shape[0] - 1)
    keys_per_turn = DECODE_PAGES * cache.k.shape[1]
    size = decode_block(page_table.shape[0])

    def block(index: jax.Array, out: jax.Array) -> jax.Array:
        start = index * size
        rows = lax.dynamic_slice_in_dim(plan.decode_order, start, size)
        length = lax.dynamic_slice_in_dim(plan.decode_len, start, size)
        queries = q[lax.dynamic_slice_in_dim(tokens, start, size)]  # [rows, K, G, D]
        wide = (size, num_kv_heads * group, num_kv_heads * head_dim)
        queries = (queries[:, :, :, None] * own_head).reshape(wide)
        table = page_table[rows]
        first = jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0)

        def turn(nth: jax.Array, carry: _Softmax) -> _Softmax:
            k, v, position = _load(cache, q.dtype, table, nth, DECODE_PAGES)
            seen = (position[None] < length[:, None]) & (
                position[None] >= first[:, None]
            )  # [rows, S]
            k, v = (x.reshape(size, -1, wide[2]) for x in (k, v))
            v = jnp.where(seen[:, :, None], v, jnp.zeros_like(v))
            scores = jnp.einsum("rhx,rsx->rhs", queries, k, preferred_element_type=jnp.float32)
            scores = jnp.where(seen[:, None], _capped(scores, soft_cap), MASKED)
            return carry.update(scores, partial(_weigh, "rhs,rsx->rhx", v))

        start_turn = jnp.min(jnp.where(length > 0, first, length[0])) // keys_per_turn
        stop_turn = -(-jnp.max(length) // keys_per_turn)
        done = lax.fori_loop(start_turn, stop_turn, turn, _Softmax.empty(wide)).result(q.dtype)
        blocks = done.reshape(size, num_kv_heads, group, num_kv_heads, head_dim)
        own = jnp.einsum("rkgkd->rkgd", blocks)
        return lax.dynamic_update_slice_in_dim(out, own, start, 0)

    out = jnp.zeros((plan.decode_order.shape[0], *q.shape[1:]), q.dtype)
    return lax.fori_loop(0, plan.decode_blocks, block, out)


def _attend_chunks(
    q: jax.Array,
    cache: Cache,
    page_table: jax.Array,
    row_start: jax.Array,
    kv_len: jax.Array,
    plan: AttentionPlan,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """[T, K, G, D]: the queries of rows with more than one token; garbage elsewhere."""
    num_tokens = q.shape[0]
    size = query_block(num_tokens)
    keys_per_turn = QUERY_PAGES * cache.k.shape[1]
    q = jnp.pad(q, ((0, size), (0, 0), (0, 0), (0, 0)))  # the last block may hang over the end

    def block(index: jax.Array, out: jax.Array) -> jax.Array:
        row, start = plan.query_row[index], plan.query_start[index]
        queries = lax.dynamic_slice_in_dim(q, start, size)  # [Q, K, G, D]
        length = kv_len[row]
        position_q = length - row_start[row + 1] + start + jnp.arange(size, dtype=jnp.int32)
        last = jnp.minimum(position_q[-1] + 1, length)
        table = page_table[row][None]

        def turn(nth: jax.Array, carry: _Softmax) -> _Softmax:
            k, v, position = _load(cache, q.dtype, table, nth, QUERY_PAGES)
            k, v = k[0], jnp.where((position < length)[:, None, None], v[0], jnp.zeros_like(v[0]))
            seen = position[None] <= position_q[:, None]  # [Q, S]
            if window is not None:
                seen &= position[None] > position_q[:, None] - window
            scores = jnp.einsum("qkgd,skd->qkgs", queries, k, preferred_element_type=jnp.float32)
            scores = jnp.where(seen[:, None, None], _capped(scores, soft_cap), MASKED)
            return carry.update(scores, partial(_weigh, "qkgs,skd->qkgd", v))

        first = 0 if window is None else jnp.maximum(position_q[0] - window + 1, 0)
        done = lax.fori_loop(
            first // keys_per_turn,
            -(-last // keys_per_turn),
            turn,
            _Softmax.empty(queries.shape),
        )
        return lax.dynamic_update_slice_in_dim(out, done.result(q.dtype), start, 0)

    # Blocks run in token order, so what one writes past its row's end is overwritten by the next.
    out = lax.fori_loop(0, plan.query_blocks, block, jnp.zeros_like(q))
    return out[:num_tokens]


def _load(
    cache: Cache, dtype: jnp.dtype, table: jax.Array, nth: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The nth group of `count` pages of each row: k and v [rows, S, K, D], positions i32[S]."""
    num_keys = count * cache.k.shape[1]
    # Entries past the table's end read as page 0; their positions are past every length.
    index = nth * count + jnp.arange(count, dtype=jnp.int32)
    ids = table.at[:, index].get(mode="fill", fill_value=0).reshape(-1)

    def gather(pages: jax.Array, scale: jax.Array | None) -> jax.Array:
        found = jnp.take(pages, ids, axis=0, mode="clip")
        if scale is not None:
            found = dequantised(found, jnp.take(scale, ids, axis=0, mode="clip"), dtype)
        return found.reshape(table.shape[0], num_keys, *pages.shape[2:])

    k, v = gather(cache.k, cache.k_scale), gather(cache.v, cache.v_scale)
    return k, v, nth * num_keys + jnp.arange(num_keys, dtype=jnp.int32)


def _capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _weigh(equation: str, v: jax.Array, weights: jax.Array) -> jax.Array:
    """f32: values summed by weight, the weights rounded to the cache's dtype first."""
    return jnp.einsum(equation, weights.astype(v.dtype), v, preferred_element_type=jnp.float32)


class _Softmax(NamedTuple):
    """Online softmax (Milakov & Gimelshein 2018): running maximum, sum and weighted values."""

    maximum: jax.Array
    total: jax.Array
    values: jax.Array

    @staticmethod
    def empty(shape: tuple[int, ...]) -> _Softmax:
        return _Softmax(
            jnp.full(shape[:-1], MASKED, jnp.float32),
            jnp.zeros(shape[:-1], jnp.float32),
            jnp.zeros(shape, jnp.float32),
        )

    def update(self, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> _Softmax:
        """Take in more keys. Keys masked for a query that has seen none yet count as garbage
        until its first visible key scales them by exp(MASKED - maximum), which is exactly 0."""
        maximum = jnp.maximum(self.maximum, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - maximum[..., None])
        decay = jnp.exp(self.maximum - maximum)
        return _Softmax(
            maximum,
            self.total * decay + jnp.sum(weights, axis=-1),
            self.values * decay[..., None] + weigh(weights),
        )

    def result(self, dtype: jnp.dtype) -> jax.Array:
        total = jnp.where(self.total > 0, self.total, 1)
        return (self.values / total[..., None]).astype(dtype)
