"""Rotary positions: what kernels that turn queries and keys themselves are held to."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Rope = tuple[jax.Array, jax.Array]
"""cos and sin, f32[T, 1, D / 2], of a step's tokens."""


def apply_rope(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotate the two halves of [T, heads, D] against each other, in float32 (RoFormer, Su et al.
    2021)."""
    cos, sin = rope
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
