"""Whole pages copied within the cache, in place: what copy-on-write needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

SLICE = 512
"""Elements of a page that one program copies."""


def copy_pages_triton(
    pages: jax.Array, source: jax.Array, target: jax.Array, *, interpret: bool
) -> jax.Array:
    """The array of pages with copies made, in the same buffer and without another.

    The copies are made in order: a page may be the target of one and the source of a later one,
    or the source of one and the target of a later one.

    Args:
        pages: [N, ...].
        source: i32[C], pages to read. target: i32[C], pages to write; N or more copies nothing.
    """
    flat = pages.reshape(pages.shape[0], -1)
    moved = 2 * source.size * flat.shape[1] * pages.dtype.itemsize
    return pl.pallas_call(
        copy_slices,
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        grid=(pl.cdiv(flat.shape[1], SLICE),),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
    )(flat, source, target).reshape(pages.shape)


def copy_slices(given_ref: Any, source_ref: Any, target_ref: Any, pages_ref: Any) -> None:
    """The same slice of every page: each thread meets only what it wrote itself, in order."""
    del given_ref  # the same memory as pages_ref
    num_pages, size = pages_ref.shape
    place = pl.program_id(0) * SLICE + jnp.arange(SLICE, dtype=jnp.int32)
    inside = place < size

    def one(nth: jax.Array, carry: None) -> None:
        @pl.when(target_ref[nth] < num_pages)
        def copy() -> None:
            source, target = (jnp.full_like(place, x[nth]) for x in (source_ref, target_ref))
            x = plgpu.load(pages_ref.at[source, place], mask=inside, other=0)
            plgpu.store(pages_ref.at[target, place], x, mask=inside)

    lax.fori_loop(0, source_ref.shape[0], one, None)
