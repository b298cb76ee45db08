"""Weights made ready for the CPU's own kernels, once they are loaded."""

from __future__ import annotations

import jax

from jaxserve.models.llama import Params
from pallas_kernels.native.linear import PackedWeight, pack

PACKED = ("qkv", "o", "gate_up", "down")
"""Of a layer: what `layers.linear` multiplies with."""


def pack_params(params: Params, *, tied_head: bool) -> Params:
    """The same model with its float32 matrices packed. The given arrays are used up, one by one:
    there is never more than one matrix twice."""
    head = "embed" if tied_head else "head"
    layers = [
        {name: _packed(leaf) if name in PACKED else leaf for name, leaf in layer.items()}
        for layer in params["layers"]
    ]
    return params | {"layers": layers, head: _packed(params[head])}


def _packed(weight: jax.Array) -> PackedWeight:
    packed = jax.block_until_ready(jax.jit(pack)(weight))
    weight.delete()
    return packed
