"""Attention of decodes: a row's keys are split over programs, and what they find is merged.

Flash-Decoding (Dao, Haziza, Massa & Sizov 2023) over pages. A program folds the query heads that
share a KV head into the rows of its dots, so that every key is loaded once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.launch_plan import MAX_SPLITS, LaunchPlan
from pallas_kernels.triton.costs import decode_cost, merge_cost
from pallas_kernels.triton.online_softmax import MASKED, CacheRefs, Keys, Settings, attend
from pallas_kernels.tuned import Tile


def attend_splits(
    q: jax.Array,
    cache: CacheRefs,
    row_start: jax.Array,
    kv_len: jax.Array,
    plan: LaunchPlan,
    tile: Tile,
    settings: Settings,
    *,
    num_programs: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """What each split of each decode finds by itself: the first half.

    Args:
        q: [T, K, G, D]. num_programs: how many share the work, over all heads. The rest as in
            `paged_attention`, `cache` holding arrays.

    Returns:
        f32[R, S, K, G, D] normalised values, and f32[R, S, K, G] the log2 of their sums of
        weights; S is the plan's `max_splits`. Splits that the plan does not have are not written.
    """
    num_kv_heads, group, head_dim = q.shape[1:]
    most = plan.split_row.shape[0]
    shape = (kv_len.shape[0], plan.max_splits, num_kv_heads, group)
    lengths = (row_start, kv_len, plan.split_row, plan.split_index, plan.num_splits)
    return pl.pallas_call(
        partial(decode_attention, settings),
        out_shape=(
            jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(num_kv_heads, min(most, pl.cdiv(num_programs, num_kv_heads))),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        cost_estimate=decode_cost(q, cache, plan.max_splits),
        interpret=interpret,
    )(q, cache, lengths, plan.row_split_len)


def decode_attention(
    settings: Settings,
    q_ref: Any,
    cache: CacheRefs,
    lengths: Any,
    split_len_ref: Any,
    out_ref: Any,
    sum_ref: Any,
) -> None:
    """Refs: q [T, K, G, D]; the others as `attend_splits` passes and returns them.

    The grid is as large as the card, not as the batch: each program takes every n-th split.
    """
    row_start_ref, kv_len_ref, row_ref, index_ref, count_ref = lengths
    head, worker, num_workers = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    member = jnp.arange(settings.rows, dtype=jnp.int32)
    dim = jnp.arange(settings.dim_pad, dtype=jnp.int32)
    mask = (member < settings.group)[:, None] & (dim < settings.head_dim)[None, :]

    def scalar(value: jax.Array) -> jax.Array:
        return jnp.full((1, 1), value, jnp.int32)

    def one(nth: jax.Array, _: None) -> None:
        piece = worker + nth * num_workers
        row, split = row_ref[piece], index_ref[piece]
        length, split_len = kv_len_ref[row], split_len_ref[row]
        place = (scalar(head), member[:, None], dim[None, :])
        q = plgpu.load(q_ref.at[(scalar(row_start_ref[row]), *place)], mask=mask, other=0)

        first, stop = split * split_len, jnp.minimum((split + 1) * split_len, length)
        if settings.window is not None:
            first = jnp.maximum(first, length - settings.window)
        turns = (first // settings.keys, pl.cdiv(stop, settings.keys))
        position = jnp.full((settings.rows,), length - 1, jnp.int32)
        done = attend(q, position, cache, Keys(row, head, length, *turns), settings)

        plgpu.store(out_ref.at[(scalar(row), scalar(split), *place)], done.normalised(), mask=mask)
        one_row = [jnp.full_like(member, x) for x in (row, split, head)]
        log_sum = done.maximum + jnp.log2(jnp.where(done.total > 0, done.total, 1.0))
        plgpu.store(sum_ref.at[(*one_row, member)], log_sum, mask=member < settings.group)

    lax.fori_loop(0, pl.cdiv(count_ref[0] - worker, num_workers), one, None)


def merge_splits(
    out: jax.Array,
    values: jax.Array,
    log_sums: jax.Array,
    row_start: jax.Array,
    plan: LaunchPlan,
    *,
    interpret: bool,
) -> jax.Array:
    """`out` [T, K, G, D], in place, its decodes filled in from what `attend_splits` returned."""
    num_rows, _, num_kv_heads, group, _ = values.shape
    return pl.pallas_call(
        merge_decodes,
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid=(num_kv_heads * group, num_rows),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=merge_cost(out, num_rows, plan.max_splits),
        interpret=interpret,
    )(out, values, log_sums, row_start, plan.row_splits)


def merge_decodes(
    given_ref: Any,
    values_ref: Any,
    sums_ref: Any,
    row_start_ref: Any,
    splits_ref: Any,
    out_ref: Any,
) -> None:
    """Refs as `merge_splits` passes them. One head of one row per program, all splits at once:
    in a tile of the same size for every row, so the order of the sum is always the same."""
    del given_ref  # the same memory as out_ref
    query_head, row = pl.program_id(0), pl.program_id(1)
    group, head_dim = values_ref.shape[3:]
    num_splits = splits_ref[row]

    @pl.when(num_splits > 0)
    def merge() -> None:
        split = jnp.arange(MAX_SPLITS, dtype=jnp.int32)
        dim = jnp.arange(pl.next_power_of_2(head_dim), dtype=jnp.int32)
        head, member = query_head // group, query_head % group
        at = [jnp.full_like(split, x) for x in (row, head, member)]
        live = split < num_splits
        sums = plgpu.load(sums_ref.at[at[0], split, at[1], at[2]], mask=live, other=MASKED)
        place = (*(x[:, None] for x in (at[0], split, at[1], at[2])), dim[None, :])
        inside = (dim < head_dim)[None, :]
        values = plgpu.load(values_ref.at[place], mask=live[:, None] & inside, other=0.0)

        weights = jnp.exp2(sums - jnp.max(sums))
        merged = jnp.sum(values * weights[:, None], axis=0) / jnp.sum(weights)
        token = row_start_ref[row]
        place = (*(jnp.full_like(dim, x) for x in (token, head, member)), dim)
        plgpu.store(out_ref.at[place], merged.astype(out_ref.dtype), mask=dim < head_dim)
