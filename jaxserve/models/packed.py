"""Weights made ready for the CPU's own kernels, once they are loaded."""

from __future__ import annotations

from functools import partial

import jax

from jaxserve.models.llama import Params
from pallas_kernels.native.linear import PackedWeight, pack

PACKED = {"qkv": False, "o": False, "gate_up": True, "down": False}
"""Of a layer: what `layers.linear` multiplies with, and whether it is gated."""


def pack_params(params: Params, *, tied_head: bool, int8: bool = False) -> Params:
    """The same model with its matrices packed, as int8 if asked for. The given arrays are
    used up, one by one: there is never more than one matrix twice."""
    packed = partial(_packed, int8=int8)
    head = "embed" if tied_head else "head"
    layers = [
        {
            name: packed(leaf, gated=PACKED[name]) if name in PACKED else leaf
            for name, leaf in layer.items()
        }
        for layer in params["layers"]
    ]
    return params | {"layers": layers, head: packed(params[head])}


def _packed(weight: jax.Array, *, int8: bool, gated: bool = False) -> PackedWeight:
    packed = jax.block_until_ready(pack(weight, int8=int8, gated=gated))
    weight.delete()
    return packed
