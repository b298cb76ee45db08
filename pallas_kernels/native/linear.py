"""Weights packed for the C++ kernel that multiplies with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.native.build import has_amx, require_native

PANEL = 32
"""Rows of a weight that lie together: kPanel in vector.h."""
SIDE = 16
"""Rows of a tile: kSide in amx.h. One has 32 numbers, in pairs."""

Gate = Literal["silu", "gelu_tanh"]
GATES: tuple[Gate | None, ...] = (None, "silu", "gelu_tanh")
"""By number: Gate in linear.cc."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in], its rows in panels of `PANEL`, transposed; rows past the last are 0.

    Attributes:
        panels: float32 or int8 [panels, in, PANEL]; or tiles of bfloat16, [panels,
            ceil(in / 32), parts, 2, 16, 16, 2]: of each part two tiles with 16 rows of the weight
            each, which hold 16 pairs of columns. A float32 weight has two parts, whose sum it is
            to 16 bits; a bfloat16 one has one.
        scale: f32[panels * PANEL], what each row of an int8 weight was divided by; else f32[0].
        num_out: out. num_in: in.
        gated: each panel has 16 rows of the weight's first half, then the same 16 of its second.
    """

    panels: jax.Array
    scale: jax.Array
    num_out: int = field(metadata={"static": True})
    num_in: int = field(metadata={"static": True})
    gated: bool = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in], as before."""
        return self.num_out, self.num_in

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weight that was packed."""
        one_part = self.panels.ndim == 7 and self.panels.shape[2] == 1
        return jnp.dtype(jnp.bfloat16 if one_part else jnp.float32)

    def rows(self, index: jax.Array) -> jax.Array:
        """Rows [..., in] of a weight that is not gated, by i32[...] number; the nearest there is
        for any other."""
        index = jnp.clip(index, 0, self.num_out - 1)
        panel, row = index // PANEL, index % PANEL
        if self.panels.ndim == 7:
            parts = self.panels[
                panel, :, :, row // SIDE, :, row % SIDE
            ]  # [.., blocks, parts, 16, 2]
            found = jnp.sum(parts.astype(jnp.float32), axis=-3)
            return found.reshape(*index.shape, -1)[..., : self.num_in].astype(self.dtype)
        found = self.panels[panel, :, row].astype(jnp.float32)
        return found * self.scale[index][..., None] if self.scale.size else found


def pack(weight: jax.Array, *, int8: bool = False, gated: bool = False) -> PackedWeight:
    """A float32 or bfloat16 weight [out, in] in panels.

    Args:
        weight: the weight. A float32 one becomes tiles where the CPU has units for them.
        int8: as int8, each row over a 127th of its largest element.
        gated: its halves are what a gate is made of and what it multiplies.
    """
    tiles = not int8 and (weight.dtype == jnp.bfloat16 or has_amx())
    return _pack(weight, int8=int8, gated=gated, tiles=tiles)


@partial(jax.jit, static_argnames=("int8", "gated", "tiles"))
def _pack(weight: jax.Array, *, int8: bool, gated: bool, tiles: bool) -> PackedWeight:
    num_out, num_in = weight.shape
    if gated:
        halves = weight.reshape(2, num_out // 2, num_in)
        halves = jnp.pad(halves, ((0, 0), (0, -(num_out // 2) % SIDE), (0, 0)))
        weight = halves.reshape(2, -1, SIDE, num_in).swapaxes(0, 1).reshape(-1, num_in)
    weight = jnp.pad(weight, ((0, -weight.shape[0] % PANEL), (0, 0)))
    scale = jnp.zeros(0, jnp.float32)
    if int8:
        scale = jnp.maximum(jnp.max(jnp.abs(weight), axis=1), 1e-30) / 127
        weight = jnp.round(weight / scale[:, None]).astype(jnp.int8)
    panels = _tiles(weight) if tiles else weight.reshape(-1, PANEL, num_in).transpose(0, 2, 1)
    return PackedWeight(panels, scale, num_out, num_in, gated)


def _tiles(weight: jax.Array) -> jax.Array:
    parts = [weight]
    if weight.dtype == jnp.float32:
        # Rounded by hand: XLA may take a conversion there and back for nothing.
        high = lax.reduce_precision(weight, exponent_bits=8, mantissa_bits=7)
        parts = [high, weight - high]
    padded = jnp.pad(
        jnp.stack(parts).astype(jnp.bfloat16), ((0, 0), (0, 0), (0, -weight.shape[1] % 32))
    )
    tiles = padded.reshape(len(parts), -1, 2, SIDE, padded.shape[2] // 32, SIDE, 2)
    return tiles.transpose(1, 4, 0, 2, 5, 3, 6)


def linear_native(
    x: jax.Array,
    weight: PackedWeight,
    *,
    norm: tuple[jax.Array, float] | None = None,
    gate: Gate | None = None,
    residual: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """x [T, in] times the weight transposed: [T, out], accumulated in float32.

    A token's result is the same bits whatever the other tokens are.

    Args:
        x: float32 or bfloat16.
        weight: from `pack`.
        norm: f32[in] and epsilon: x goes through RMSNorm first.
        gate: of a gated weight, the result is [T, out / 2]: gate(first half) times the second.
        residual: added to the result, of its shape and dtype.
        dtype: of the result; None: x's.
    """
    require_native()
    if weight.gated != (gate is not None):
        raise ValueError(f"gate {gate} does not go with a weight packed with gated={weight.gated}")
    dtype = x.dtype if dtype is None else dtype
    columns = weight.num_out // 2 if gate else weight.num_out
    call = jax.ffi.ffi_call("jaxserve_linear", jax.ShapeDtypeStruct((x.shape[0], columns), dtype))
    norm_weight, eps = norm or (jnp.zeros(0, jnp.float32), 0.0)
    return call(
        x,
        weight.panels,
        weight.scale,
        norm_weight,
        jnp.zeros(0, dtype) if residual is None else residual,
        eps=np.float32(eps),
        gate=np.int64(GATES.index(gate)),
        use_amx=has_amx(),
    )
