"""What the attention kernels say they cost, to XLA's scheduler and to whoever counts bytes.

Lengths are known on the device only. The estimates are those of a batch that fills its shape:
rows alike, each as long as its page table; decodes if there is a row for every token, and chunks
if there are fewer. Keys and values count once a row: tiles of a row that read them again find
them in the cache of the chip, or in part.
"""

from __future__ import annotations

import jax
from jax.experimental import pallas as pl

from pallas_kernels.operands import CacheRefs


def prefill_cost(q: jax.Array, cache: CacheRefs) -> pl.CostEstimate:
    """Of q [T, K, G, D] in tiles."""
    num_tokens, num_rows, keys = q.shape[0], cache.table.shape[0], _row_keys(cache)
    if num_tokens <= num_rows:
        return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0)
    tokens = -(-num_tokens // num_rows)
    pairs = num_rows * tokens * keys - num_rows * tokens * (tokens - 1) // 2
    return _attention(q, cache, pairs, written=q.size * q.dtype.itemsize)


def decode_cost(q: jax.Array, cache: CacheRefs, num_splits: int) -> pl.CostEstimate:
    """Of q [T, K, G, D] in splits, `num_splits` a row."""
    num_tokens, num_rows = q.shape[0], cache.table.shape[0]
    if num_tokens > num_rows:
        return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0)
    pairs = num_rows * _row_keys(cache)
    return _attention(q, cache, pairs, written=partial_bytes(q, num_splits))


def merge_cost(out: jax.Array, num_rows: int, num_splits: int) -> pl.CostEstimate:
    """Of merging the splits into [T, K, G, D]."""
    if out.shape[0] > num_rows:
        return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0)
    return pl.CostEstimate(
        flops=2 * out.size * num_splits,
        transcendentals=out.size // out.shape[3] * num_splits,
        bytes_accessed=partial_bytes(out, num_splits) + out.size * out.dtype.itemsize,
    )


def partial_bytes(q: jax.Array, num_splits: int) -> int:
    """What the splits of q [T, K, G, D] leave for the merge, in float32."""
    return num_splits * (q.size + q.size // q.shape[3]) * 4


def _row_keys(cache: CacheRefs) -> int:
    return cache.table.shape[1] * cache.k.shape[1]


def _attention(q: jax.Array, cache: CacheRefs, pairs: int, *, written: int) -> pl.CostEstimate:
    """Of so many pairs of a token and a key that it sees, all heads."""
    _, num_kv_heads, group, head_dim = q.shape
    keys = cache.table.shape[0] * _row_keys(cache)
    scales = 0 if cache.k_scale is None else cache.k_scale.dtype.itemsize
    key_bytes = 2 * num_kv_heads * (head_dim * cache.k.dtype.itemsize + scales)
    return pl.CostEstimate(
        flops=4 * pairs * num_kv_heads * group * head_dim,
        transcendentals=pairs * num_kv_heads * group,
        bytes_accessed=q.size * q.dtype.itemsize + keys * key_bytes + written,
    )
