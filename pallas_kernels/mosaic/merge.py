"""What the splits of a decode found, put together: the second half of Flash-Decoding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.costs import merge_cost
from pallas_kernels.launch_plan import LaunchPlan
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.operands import MASKED


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
    num_rows, _, num_kv_heads, group, padded = values.shape
    out_ref = jax.new_ref(out)
    launch(
        merge_decodes,
        name="merge_decodes",
        out_type=(),
        scratch=(plgpu.SMEM((padded,), out.dtype),),
        grid={"head": num_kv_heads * group, "row": num_rows},
        warpgroups=1,
        cost=merge_cost(out, num_rows, plan.max_splits),
        interpret=interpret,
    )(values, log_sums, row_start, plan.row_splits, out_ref)
    return jax.freeze(out_ref)


def merge_decodes(
    values_ref: Any, sums_ref: Any, row_start_ref: Any, splits_ref: Any, out_ref: Any, staged: Any
) -> None:
    """Refs as `merge_splits` passes them. One head of one row per program, split after split."""
    query_head, row = lax.axis_index("head"), lax.axis_index("row")
    group, head_dim = out_ref.shape[2:]
    head, member = lax.div(query_head, group), lax.rem(query_head, group)
    num_splits = splits_ref[row]
    padded = staged.shape[0]
    layout = plgpu.Layout.WG_STRIDED((padded,), vec_size=padded // 128)

    @pl.when(num_splits > 0)
    def merge() -> None:
        def one(
            split: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            values, maximum, total = state
            log_sum = sums_ref[row, split, head, member]
            found = plgpu.load(values_ref.at[row, split, head, member], layout=layout)
            larger = jnp.maximum(maximum, log_sum)
            decay, weight = jnp.exp2(maximum - larger), jnp.exp2(log_sum - larger)
            return values * decay + found * weight, larger, total * decay + weight

        nothing = plgpu.layout_cast(jnp.zeros((padded,), jnp.float32), layout)
        start = (nothing, jnp.float32(MASKED), jnp.float32(0))
        values, _, total = lax.fori_loop(0, num_splits, one, start)
        staged[...] = (values / total).astype(staged.dtype)
        plgpu.commit_smem()
        place = out_ref.at[row_start_ref[row], head, member]
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, head_dim)], place)
        plgpu.wait_smem_to_gmem(0)
