"""A step's keys and values into their pages, in place: one kernel, which also quantises."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.reference import quantised


def write_kv_triton(
    pages: tuple[jax.Array, ...],
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The cache with this step's keys and values in it, in the same buffers.

    XLA's scatter is in place as well, but takes a kernel for each array, and six where it has to
    quantise.

    Args:
        pages: k and v [N, B, K, D]; of int8, then also their scales f32[N, B, K].
        k: [T, K, D]. v: the same.
        slots: i32[T], place of each token in the cache read as [N * B]; N * B drops the token.
    """
    first = 3  # operand number of the first page array
    moved = 2 * k.size * (k.dtype.itemsize + pages[0].dtype.itemsize)
    moved += sum(scale.dtype.itemsize * k.size // k.shape[2] for scale in pages[2:])
    return pl.pallas_call(
        partial(write_keys_values, len(pages)),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages),
        grid=(k.shape[0],),
        input_output_aliases={first + i: i for i in range(len(pages))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
    )(k, v, slots, *pages)


def write_keys_values(num_pages: int, k_ref: Any, v_ref: Any, slots_ref: Any, *pages: Any) -> None:
    """One token per program. `pages`: the arrays as they are given, then as they are returned."""
    out = pages[num_pages:]
    token = pl.program_id(0)
    cache_pages, page_size, num_kv_heads, head_dim = out[0].shape
    slot = slots_ref[token]

    @pl.when(slot < cache_pages * page_size)
    def write() -> None:
        head = jnp.arange(pl.next_power_of_2(num_kv_heads), dtype=jnp.int32)
        dim = jnp.arange(pl.next_power_of_2(head_dim), dtype=jnp.int32)
        place = (lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size)))
        heads = head < num_kv_heads
        mask = heads[:, None] & (dim < head_dim)[None, :]
        for nth, new in enumerate((k_ref, v_ref)):
            index = (jnp.full((1, 1), token, jnp.int32), head[:, None], dim[None, :])
            x = plgpu.load(new.at[index], mask=mask, other=0)
            if num_pages == 4:
                x, scale = quantised(x)
                where = (*(jnp.full_like(head, i) for i in place), head)
                plgpu.store(out[2 + nth].at[where], scale, mask=heads)
            where = (*(jnp.full((1, 1), i, jnp.int32) for i in place), *index[1:])
            plgpu.store(out[nth].at[where], x.astype(out[nth].dtype), mask=mask)
