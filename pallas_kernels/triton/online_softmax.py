"""What the attention kernels share: dots over the keys of a row's pages, and an online softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.operands import MASKED, CacheRefs, Keys


@dataclass(frozen=True, slots=True)
class Settings:
    """What an attention kernel is compiled for.

    Attributes:
        scale: factor on q.k.
        window: keys a query sees, or None.
        soft_cap: bound of scores, or None.
        group: query heads per KV head. group_pad, dim_pad: group and head dim as powers of two.
        query_block: queries per program.
        keys: keys a turn.
    """

    scale: float
    window: int | None
    soft_cap: float | None
    group: int
    group_pad: int
    head_dim: int
    dim_pad: int
    query_block: int
    keys: int

    @property
    def rows(self) -> int:
        """Rows of the dots: queries times heads, at least what a dot wants."""
        return max(16, self.query_block * self.group_pad)


class Attended(NamedTuple):
    """Values f32[M, D'] summed by weight, and of each row the maximal score and sum of weights.

    Scores are to base 2.
    """

    values: jax.Array
    maximum: jax.Array
    total: jax.Array

    def normalised(self) -> jax.Array:
        """f32[M, D']. Rows that saw nothing are zeros."""
        return self.values / jnp.where(self.total > 0, self.total, 1.0)[:, None]


def attend(
    q: jax.Array, position: jax.Array, cache: CacheRefs, keys: Keys, settings: Settings
) -> Attended:
    """Attention of queries q [M, D'] at positions i32[M] of a row over some of its keys.

    Turns are aligned in the row, and a turn that shows a query nothing changes no bit of its
    result: what comes out depends on the visible keys alone (Milakov & Gimelshein 2018).
    """
    dim = jnp.arange(settings.dim_pad, dtype=jnp.int32)
    head = jnp.full((1, 1), keys.head, jnp.int32)

    def turn(nth: jax.Array, state: Attended) -> Attended:
        key = nth * settings.keys + jnp.arange(settings.keys, dtype=jnp.int32)
        owned = key < keys.length
        page, offset = _place(cache, keys.row, key, owned)
        index = (page[:, None], offset[:, None], head, dim[None, :])
        mask = owned[:, None] & (dim < settings.head_dim)[None, :]
        # Masked values are zeros, never loaded: a NaN in a place nobody owns has no influence.
        k = plgpu.load(cache.k.at[index], mask=mask, other=0)  # [S, D']
        scores = _dot(q, k.astype(q.dtype).T)  # f32[M, S]
        if cache.k_scale is not None:
            scores *= _scales(cache.k_scale, page, offset, keys.head, owned)[None, :]
        visible = key[None, :] <= position[:, None]
        if settings.window is not None:
            visible &= key[None, :] > position[:, None] - settings.window
        scores = jnp.where(visible, _base_2(scores, settings), -jnp.inf)

        maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - maximum[:, None])
        decay = jnp.exp2(state.maximum - maximum)
        total = state.total * decay + jnp.sum(weights, axis=1)
        if cache.v_scale is not None:
            weights *= _scales(cache.v_scale, page, offset, keys.head, owned)[None, :]
        v = plgpu.load(cache.v.at[index], mask=mask, other=0)
        values = state.values * decay[:, None] + _dot(weights.astype(q.dtype), v.astype(q.dtype))
        return Attended(values, maximum, total)

    nothing = Attended(
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(q.shape[:1], MASKED, jnp.float32),
        jnp.zeros(q.shape[:1], jnp.float32),
    )
    return lax.fori_loop(keys.first_turn, keys.stop_turn, turn, nothing)


def _place(
    cache: CacheRefs, row: jax.Array, key: jax.Array, owned: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """i32[S] each: page and place in it of a row's keys. Of what it does not own, page 0."""
    page_size = jnp.int32(cache.k.shape[1])
    entry = lax.div(key, page_size)
    page = plgpu.load(cache.table.at[jnp.full_like(entry, row), entry], mask=owned, other=0)
    return page, lax.rem(key, page_size)


def _scales(
    ref: Any, page: jax.Array, offset: jax.Array, head: jax.Array, owned: jax.Array
) -> jax.Array:
    """f32[S] of int8 keys or values."""
    return plgpu.load(ref.at[page, offset, jnp.full_like(page, head)], mask=owned, other=0.0)


def _base_2(scores: jax.Array, settings: Settings) -> jax.Array:
    """Scaled and capped, times log2(e): exp2 is the instruction that the hardware has."""
    if settings.soft_cap is None:
        return scores * (settings.scale * math.log2(math.e))
    cap = settings.soft_cap
    return jnp.tanh(scores * (settings.scale / cap)) * (cap * math.log2(math.e))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """f32: a dot on tensor cores; of float32 in full precision."""
    return jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)
