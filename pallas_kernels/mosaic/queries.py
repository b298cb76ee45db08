"""A warpgroup's queries, and what comes of them: copied in and out query by query."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.pipeline import tensor_core_layout
from pallas_kernels.mosaic.shape import ROWS, Shape

ROW = plgpu.Layout.WGMMA.reduce(1)
"""How a warpgroup holds one number for each row of a matrix."""


class Tile(NamedTuple):
    """A warpgroup's shared memory: q [M, D] as wgmma wants it, and for copies `staged` [M, W], row
    after row, a few columns at a time."""

    q: Any
    staged: Any


def tile_types(shape: Shape, dtype: jnp.dtype) -> Tile:
    """Scratch to ask for: a tile for each warpgroup."""
    whole, part = ((shape.warpgroups, ROWS, dims) for dims in (shape.head_dim, shape.width))
    layout = tensor_core_layout(shape)
    return Tile(plgpu.SMEM(whole, dtype, transforms=layout), plgpu.SMEM(part, dtype))


def tile_of(tiles: Tile, warpgroup: jax.Array) -> Tile:
    """A warpgroup's part of the scratch."""
    return Tile(*(ref.at[warpgroup] for ref in tiles))


def rows_of(nth: int | jax.Array, shape: Shape) -> Any:
    """The rows of a matrix that are the heads of a warpgroup's n-th query."""
    return pl.ds(nth * shape.pitch, shape.group)


def query_of_lane(shape: Shape) -> jax.Array:
    """i32[M]: which of the warpgroup's queries each row belongs to."""
    lane = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
    return lax.div(lane, jnp.full_like(lane, shape.pitch))


def load_queries(source: Callable[[jax.Array], Any], tile: Tile, loaded: Any, shape: Shape) -> None:
    """The heads [G, D] of each query, from the ref that `source` says; `loaded` is a barrier for
    `Shape.queries` copies."""
    for column in range(0, shape.head_dim, shape.width):
        columns = pl.ds(column, shape.width)

        @pl.loop(0, shape.queries)
        def load(nth: jax.Array, columns: Any = columns) -> None:
            rows = tile.staged.at[rows_of(nth, shape)]
            plgpu.copy_gmem_to_smem(source(nth).at[:, columns], rows, loaded)

        plgpu.barrier_wait(loaded)
        tile.q[:, columns] = tile.staged[...]
        plgpu.commit_smem()


def store_queries(
    values: jax.Array,
    target: Callable[[jax.Array], tuple[Any, jax.Array]],
    staged: Any,
    shape: Shape,
) -> None:
    """Of values f32[M, D] each query's to the ref [G, D] that `target` says, if it says so; by way
    of `staged` [M, W]."""
    for column in range(0, shape.head_dim, shape.width):
        part = lax.slice(values, (0, column), (ROWS, column + shape.width))
        plgpu.commit_smem()  # no warp still reads what was there
        staged[...] = part.astype(staged.dtype)
        plgpu.commit_smem()

        @pl.loop(0, shape.queries)
        def store(nth: jax.Array, column: int = column) -> None:
            ref, wanted = target(nth)

            @pl.when(wanted)
            def copy() -> None:
                columns = ref.at[:, pl.ds(column, shape.width)]
                plgpu.copy_smem_to_gmem(staged.at[rows_of(nth, shape)], columns)

        plgpu.wait_smem_to_gmem(0)
