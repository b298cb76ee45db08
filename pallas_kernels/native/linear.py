"""Weights packed for the C++ kernel that multiplies with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.native.build import require_native

PANEL = 32
"""Rows of a weight that lie together: kPanel in vector.h."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in], its rows in panels of `PANEL`, transposed.

    Attributes:
        panels: float32 or int8 [ceil(out / PANEL), in, PANEL]; rows past the last are 0.
        scale: f32[out], what each row of an int8 weight was divided by; f32[0] of a float one.
        num_out: out.
    """

    panels: jax.Array
    scale: jax.Array
    num_out: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in], as before."""
        return self.num_out, self.panels.shape[1]

    def rows(self, index: jax.Array) -> jax.Array:
        """Rows [..., in] of the weight, by i32[...] number; the nearest there is for any other."""
        index = jnp.clip(index, 0, self.num_out - 1)
        found = self.panels[index // PANEL, :, index % PANEL].astype(jnp.float32)
        return found * self.scale[index][..., None] if self.scale.size else found


def pack(weight: jax.Array, *, int8: bool = False) -> PackedWeight:
    """A float32 weight [out, in] in panels; as int8, each row over a 127th of its largest element,
    if asked for."""
    scale = jnp.zeros(0, jnp.float32)
    num_out, num_in = weight.shape
    if int8:
        scale = jnp.maximum(jnp.max(jnp.abs(weight), axis=1), 1e-30) / 127
        weight = jnp.round(weight / scale[:, None]).astype(jnp.int8)
    padded = jnp.pad(weight, ((0, -num_out % PANEL), (0, 0)))
    panels = padded.reshape(-1, PANEL, num_in).transpose(0, 2, 1)
    return PackedWeight(panels, scale, num_out)


def linear_native(x: jax.Array, weight: PackedWeight) -> jax.Array:
    """f32[T, in] times the weight transposed: f32[T, out].

    A token's result is the same bits whatever the other tokens are.
    """
    require_native()
    out = jax.ShapeDtypeStruct((x.shape[0], weight.num_out), jnp.float32)
    return jax.ffi.ffi_call("jaxserve_linear", out)(x, weight.panels, weight.scale)
