"""What the Mosaic kernels share: wgmma over turns of the ring, online softmax in registers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.pipeline import Ring
from pallas_kernels.mosaic.queries import ROW
from pallas_kernels.mosaic.shape import ROWS, Shape
from pallas_kernels.operands import MASKED, Keys

TILE = plgpu.Layout.WGMMA
"""How a warpgroup holds a matrix in registers: each thread parts of two rows."""


class Attended(NamedTuple):
    """Values f32[M, D] summed by weight, and of each row the maximal score and sum of weights.

    Scores are to base 2.
    """

    values: jax.Array
    maximum: jax.Array
    total: jax.Array

    def normalised(self) -> jax.Array:
        """f32[M, D]. Rows that saw nothing are zeros."""
        return self.values / _columns(jnp.where(self.total > 0, self.total, 1.0), self.values)


def attend(
    q: Any,
    position: jax.Array,
    between: tuple[jax.Array, jax.Array],
    keys: Keys,
    ring: Ring,
    cleaned: Any,
    shape: Shape,
    done: jax.Array,
    *,
    interpret: bool,
) -> Attended:
    """Attention of a warpgroup's queries over the turns that the producer brings.

    Turns are aligned in the row, and a turn that shows a query nothing changes no bit of its
    result: what comes out depends on the visible keys alone (Milakov & Gimelshein 2018).

    Args:
        q: ref [M, D] in shared memory, as wgmma wants it.
        position: i32[M] of each row. between: the lowest and the highest that matter.
        keys: which turns. ring: where they come. done: turns of the ring that were before.
        cleaned: barrier, of all warpgroups that compute.
    """
    nothing = Attended(
        plgpu.layout_cast(jnp.zeros((ROWS, shape.head_dim), jnp.float32), TILE),
        plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW),
    )

    def turn(nth: jax.Array, state: Attended) -> Attended:
        place = lax.rem(done + nth - keys.first_turn, shape.turns)
        start, stop = nth * shape.keys, (nth + 1) * shape.keys

        # First, while the registers are free.
        @pl.when(stop > keys.length)
        def clean() -> None:
            plgpu.barrier_wait(ring.v_filled.at[place])
            _clear_unowned(ring.v.at[place], keys.length - start, cleaned, shape)

        plgpu.barrier_wait(ring.k_filled.at[place])
        scores = _scores(q, ring.k.at[place])
        plgpu.barrier_arrive(ring.k_free.at[place])
        scores, factor = _capped(scores, shape)

        def mask(scores: jax.Array) -> jax.Array:
            key = start + _iota(scores.shape, 1)
            visible = key <= _columns(position, scores)
            if shape.window is not None:
                visible &= key > _columns(position - shape.window, scores)
            return jnp.where(visible, scores, -jnp.inf)

        partly = stop > between[0] + 1
        if shape.window is not None:
            partly |= start <= between[1] - shape.window
        scores = lax.cond(partly, mask, lambda scores: scores, scores)

        maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=1) * factor)
        weights = jnp.exp2(scores * factor - _columns(maximum, scores))
        decay = jnp.exp2(state.maximum - maximum)
        total = state.total * decay + jnp.sum(weights, axis=1)
        weights = weights.astype(ring.v.dtype)
        values = state.values * _columns(decay, state.values)
        values, weights, total = lax.optimization_barrier((values, weights, total))

        @pl.when(stop <= keys.length)
        def wait() -> None:
            plgpu.barrier_wait(ring.v_filled.at[place])

        values = _accumulate(values, weights, ring.v.at[place], interpret)
        plgpu.barrier_arrive(ring.v_free.at[place])
        return Attended(values, maximum, total)

    return lax.fori_loop(keys.first_turn, keys.stop_turn, turn, nothing)


def _scores(q: Any, k: Any) -> jax.Array:
    """f32[M, S] of refs q [M, D] and k [S, D]."""

    def multiply(sums: Any) -> jax.Array:
        plgpu.wgmma(sums, q, k.transpose((1, 0)))
        return sums[...]

    return pl.run_scoped(multiply, plgpu.ACC((q.shape[0], k.shape[0]), jnp.float32))


def _accumulate(values: jax.Array, weights: jax.Array, v: Any, interpret: bool) -> jax.Array:
    """f32[M, D]: the values and weights [M, S] times the ref v [S, D]."""
    if interpret:  # Pallas' interpreter has no sums to go on from, nor a left side in registers
        read = v[...]
        plgpu.commit_smem()  # not for a wgmma: with that no thread reads
        return values + jnp.dot(weights, read, preferred_element_type=jnp.float32)

    def multiply(sums: Any) -> None:
        plgpu.wgmma(sums, weights, v)

    return pl.run_state(multiply)(plgpu.ACC.init(values))


def _clear_unowned(v: Any, owned: jax.Array, cleaned: Any, shape: Shape) -> None:
    """Zeros for the values [S, D] after the first `owned`: nothing times NaN would be NaN.

    Keys need none of it: their scores are masked. One warpgroup clears, all wait.
    """

    @pl.when(lax.axis_index("warpgroup") == 0)
    def clear() -> None:
        width = shape.swizzle // 2
        for column in range(0, shape.head_dim, width):
            part = v.at[:, pl.ds(column, width)]
            x = plgpu.load(part, layout=TILE)
            part[...] = jnp.where(_iota(x.shape, 0) < owned, x, jnp.zeros_like(x))
        plgpu.commit_smem()

    plgpu.barrier_arrive(cleaned)
    plgpu.barrier_wait(cleaned)


def _capped(scores: jax.Array, shape: Shape) -> tuple[jax.Array, float]:
    """Bounded, and the factor that is still to come for scores to base 2: exp2 is the instruction
    that the hardware has, and a factor costs nothing beside a difference."""
    base_2 = math.log2(math.e)
    if shape.soft_cap is None:
        return scores, shape.scale * base_2
    # tanh(x) = 1 - 2 / (1 + exp(2 x)): the hardware's own tanh is good for three digits.
    power = jnp.exp2(scores * (2 * base_2 * shape.scale / shape.soft_cap))
    return 1.0 - 2.0 / (1.0 + power), shape.soft_cap * base_2


def _iota(shape: tuple[int, ...], dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=TILE)


def _columns(x: jax.Array, like: jax.Array) -> jax.Array:
    """[M] as the columns of a matrix [M, ...]."""
    return lax.broadcast_in_dim(x, like.shape, [0])
