"""Keys and values on their way from pages to tensor cores: a ring of buffers in shared memory.

One warpgroup, the producer, asks the copy engine (TMA) for the pages of a turn as soon as a place
of the ring is free, and so runs ahead of the warpgroups that compute.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.shape import Shape
from pallas_kernels.operands import CacheRefs, Keys

PRODUCER_REGISTERS = 40


class Ring(NamedTuple):
    """Buffers [turns, S, D] and, for each place in them, a barrier that it is filled and free.

    Of keys and values apart: scores can begin before the values are there.
    """

    k: Any
    v: Any
    k_filled: Any
    v_filled: Any
    k_free: Any
    v_free: Any


def ring_types(shape: Shape, dtype: jnp.dtype) -> Ring:
    """Scratch to ask for."""
    buffer = plgpu.SMEM(
        (shape.turns, shape.keys, shape.head_dim), dtype, transforms=tensor_core_layout(shape)
    )
    # A copy arrives when all its bytes have.
    filled = plgpu.Barrier(num_arrivals=shape.keys // shape.piece, num_barriers=shape.turns)
    free = plgpu.Barrier(num_arrivals=shape.warpgroups, num_barriers=shape.turns)
    return Ring(buffer, buffer, filled, filled, free, free)


def tensor_core_layout(shape: Shape) -> tuple[Any, ...]:
    """How wgmma wants a matrix of 2-byte elements in shared memory."""
    swizzle = plgpu.SwizzleTransform(shape.swizzle)
    return plgpu.TilingTransform((8, shape.swizzle // 2)), swizzle


def fill_ring(cache: CacheRefs, keys: Keys, ring: Ring, shape: Shape, done: jax.Array) -> jax.Array:
    """Copy the turns of `keys` into the ring, after the `done` ones that were before.

    Returns `done` with these. A place past the row's last page gets that page again: what nobody
    owns has no page of its own, and the barrier counts copies.
    """
    last_page = lax.div(keys.length - 1, shape.page_size)

    def turn(nth: jax.Array, done: jax.Array) -> jax.Array:
        place = lax.rem(done, shape.turns)

        def source(piece: int) -> tuple[Any, ...]:
            key = nth * shape.keys + piece
            page = cache.table[keys.row, jnp.minimum(lax.div(key, shape.page_size), last_page)]
            if shape.piece == shape.page_size:
                return page, slice(None), keys.head
            offset = pl.multiple_of(lax.rem(key, shape.page_size), shape.piece)
            return page, pl.ds(offset, shape.piece), keys.head

        for pages, buffer, filled, free in (
            (cache.k, ring.k, ring.k_filled, ring.k_free),
            (cache.v, ring.v, ring.v_filled, ring.v_free),
        ):

            @pl.when(done >= shape.turns)
            def wait(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[place])

            for piece in range(0, shape.keys, shape.piece):
                target = buffer.at[place, pl.ds(piece, shape.piece)]
                plgpu.copy_gmem_to_smem(pages.at[source(piece)], target, filled.at[place])
        return done + 1

    return lax.fori_loop(keys.first_turn, keys.stop_turn, turn, done)


def drain_ring(ring: Ring, shape: Shape, done: jax.Array) -> None:
    """Wait until all that was copied has been used: a producer sees every turn's end."""

    @pl.loop(0, jnp.minimum(done, shape.turns))
    def wait(place: jax.Array) -> None:
        plgpu.barrier_wait(ring.k_free.at[place])
        plgpu.barrier_wait(ring.v_free.at[place])
