"""The pieces every family is made of. Weights are `[out, in]`, as checkpoints publish them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from checkpoints.model_config import Activation, Rope
from pallas_kernels.native.linear import PackedWeight, linear_native

Weight = jax.Array | PackedWeight


def linear(x: jax.Array, weight: Weight, dtype: jnp.dtype | None = None) -> jax.Array:
    """x [T, in] times weight [out, in] transposed: [T, out] of `dtype`, by default that of x.

    The sums are float32. The product itself rounds them: a result of float32, rounded afterwards,
    is written and read once more on a GPU.
    """
    if isinstance(weight, PackedWeight):
        return linear_native(x, weight)
    dtype = dtype or x.dtype
    if x.shape[0] == 1 and dtype != weight.dtype:
        # A product of one row XLA turns into another kind, over a copy of the weight in that type.
        return linear(jnp.pad(x, ((0, 1), (0, 0))), weight, dtype)[:1]
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def take_rows(weight: Weight, index: jax.Array) -> jax.Array:
    """Rows [T, in] of a weight [out, in], by i32[T] number."""
    if isinstance(weight, PackedWeight):
        return weight.rows(index)
    return jnp.take(weight, index, axis=0, mode="clip")


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm (Zhang & Sennrich 2019) over the last axis, in float32. weight: f32, a multiplier."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def gated_mlp(x: jax.Array, gate_up: Weight, down: Weight, kind: Activation) -> jax.Array:
    """down(act(gate(x)) * up(x)); gate_up [2F, E] holds the gate's rows, then the up's."""
    gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    act = jax.nn.silu(gate) if kind == "silu" else jax.nn.gelu(gate, approximate=True)
    return linear(act * up, down)


def rope_frequencies(rope: Rope, head_dim: int) -> jax.Array:
    """f32[D / 2], radians per position (RoFormer, Su et al. 2021).

    "llama3" scaling is that of Meta's Llama 3.1 release: wavelengths longer than the original
    context stretch by `factor`, short ones stay, and those between blend linearly in frequency.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequency = rope.theta**-exponent
    if rope.scaling == "default":
        return frequency
    if rope.scaling == "linear":
        return frequency / rope.factor
    wavelength = 2 * math.pi / frequency
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = jnp.clip(blend, 0.0, 1.0)
    return frequency * (blend + (1 - blend) / rope.factor)


def rope_tables(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, f32[T, 1, D / 2], for i32[T] positions."""
    angle = positions[:, None].astype(jnp.float32) * rope_frequencies(rope, head_dim)[None]
    return jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the two halves of [T, heads, D] against each other, in float32."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
