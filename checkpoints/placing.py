"""Leaves -> jax arrays on their devices. The one module here, with orbax_io, that needs jax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from checkpoints.tensor_files import Array

Params = dict[str, Any]
"""The parameter tree: see the package's README for its leaves."""


def place(
    leaves: Iterable[tuple[tuple[str | int, ...], Array]],
    sharding: jax.sharding.Sharding | None,
) -> Params:
    """Put leaves on the device one by one, each before the next is read.

    Args:
        leaves: path and host array, in target dtype.
        sharding: of every leaf; None is the default device.
    """
    params: Params = {}
    for path, array in leaves:
        # Waiting keeps a single leaf on the host: the transfer holds on to its buffer.
        insert(params, path, jax.device_put(array, sharding).block_until_ready())
    return params


def insert(params: Params, path: tuple[str | int, ...], value: Any) -> None:
    """Store a leaf under its path. Leaves of a layer come after those of the layer before."""
    if len(path) == 1:
        params[str(path[0])] = value
        return
    layers = params.setdefault("layers", [])
    _, index, key = path
    if index == len(layers):
        layers.append({})
    layers[index][key] = value
