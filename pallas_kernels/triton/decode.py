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

from pallas_kernels.costs import decode_cost, merge_cost
from pallas_kernels.launch_plan import MAX_SPLITS, LaunchPlan
from pallas_kernels.operands import MASKED, CacheRefs, Keys
from pallas_kernels.triton.online_softmax import Settings, attend
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
    pieces = plan.piece_rows, plan.piece_split, plan.num_pieces
    if settings.window is not None:  # it shows rows of different lengths different keys of a split
        pieces = plan.split_row[:, None], plan.split_index, plan.num_splits
    most = plan.split_row.shape[0]
    shape = (kv_len.shape[0], plan.max_splits, num_kv_heads, group)
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
    )(q, cache, (row_start, kv_len, plan.row_split_len), pieces)


def decode_attention(
    settings: Settings,
    q_ref: Any,
    cache: CacheRefs,
    lengths: Any,
    pieces: Any,
    out_ref: Any,
    sum_ref: Any,
) -> None:
    """Refs: q [T, K, G, D]; the others as `attend_splits` passes and returns them.

    The grid is as large as the card, not as the batch: each program takes every n-th piece. The
    rows of a piece own all keys of its split, in the same pages, and see them all; so what holds
    for the first of them holds for all. It may end within the split where there is no other.
    """
    row_start_ref, kv_len_ref, split_len_ref = lengths
    rows_ref, split_ref, count_ref = pieces
    head, worker, num_workers = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    lane = jnp.arange(settings.rows, dtype=jnp.int32)
    nth_row, member = lane // settings.group_pad, lane % settings.group_pad
    held = (nth_row < rows_ref.shape[1]) & (member < settings.group)
    dim = jnp.arange(settings.dim_pad, dtype=jnp.int32)

    def one(nth: jax.Array, _: None) -> None:
        piece = worker + nth * num_workers
        first_row, split = rows_ref[piece, 0], split_ref[piece]
        row = plgpu.load(rows_ref.at[jnp.full_like(lane, piece), nth_row], mask=held, other=-1)
        live = row >= 0
        # Masked lanes keep an index of their own: one that nothing else has, even out of range.
        row = jnp.where(live, row, kv_len_ref.shape[0] + lane)
        token = plgpu.load(row_start_ref.at[row], mask=live, other=0)
        place = (token[:, None], jnp.full((1, 1), head, jnp.int32), member[:, None], dim[None, :])
        mask = live[:, None] & (dim < settings.head_dim)[None, :]
        q = plgpu.load(q_ref.at[place], mask=mask, other=0)

        length, split_len = kv_len_ref[first_row], split_len_ref[first_row]
        first, stop = split * split_len, jnp.minimum((split + 1) * split_len, length)
        if settings.window is not None:
            first = jnp.maximum(first, length - settings.window)
        turns = (first // settings.keys, pl.cdiv(stop, settings.keys))
        position = jnp.full_like(lane, length - 1)
        done = attend(q, position, cache, Keys(first_row, head, length, *turns), settings)

        here = (row, *(jnp.full_like(lane, x) for x in (split, head)), member)
        tile = (*(x[:, None] for x in here), dim[None, :])
        plgpu.store(out_ref.at[tile], done.normalised(), mask=mask)
        log_sum = done.maximum + jnp.log2(jnp.where(done.total > 0, done.total, 1.0))
        plgpu.store(sum_ref.at[here], log_sum, mask=live)

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
