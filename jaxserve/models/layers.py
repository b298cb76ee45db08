"""The pieces every family is made of. Weights are `[out, in]`, as checkpoints publish them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from checkpoints.model_config import Activation, Rope
from pallas_kernels.native.linear import PackedWeight, linear_native

Weight = jax.Array | PackedWeight
Norm = tuple[jax.Array, float]
"""An RMSNorm's weight f32[E] and epsilon."""


def linear(
    x: jax.Array,
    weight: Weight,
    *,
    norm: Norm | None = None,
    residual: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """x [T, in] times weight [out, in] transposed: [T, out].

    The sums are float32. The product itself rounds them: a result of float32, rounded afterwards,
    is written and read once more on a GPU.

    Args:
        x, weight: the factors.
        norm: x goes through this first.
        residual: [T, out], added to the result.
        dtype: of the result; None: x's.
    """
    if isinstance(weight, PackedWeight):
        return linear_native(x, weight, norm=norm, residual=residual, dtype=dtype)
    if norm is not None:
        x = rms_norm(x, *norm)
    dtype = dtype or x.dtype
    if x.shape[0] == 1 and dtype != weight.dtype:
        # A product of one row XLA turns into another kind, over a copy of the weight in that type.
        out = linear(jnp.pad(x, ((0, 1), (0, 0))), weight, dtype=dtype)[:1]
    else:
        out = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    return out if residual is None else residual + out


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


def gated_mlp(
    x: jax.Array,
    gate_up: Weight,
    down: Weight,
    kind: Activation,
    *,
    norm: Norm | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """down(act(gate(x)) * up(x)); gate_up [2F, E] holds the gate's rows, then the up's. `norm` and
    `residual` as in `linear`."""
    if isinstance(gate_up, PackedWeight):
        gated = linear_native(x, gate_up, norm=norm, gate=kind)
    else:
        gate, up = jnp.split(linear(x, gate_up, norm=norm), 2, axis=-1)
        gated = up * (jax.nn.silu(gate) if kind == "silu" else jax.nn.gelu(gate, approximate=True))
    return linear(gated, down, residual=residual)


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
