"""Whole pages on the move: copied within the cache, out to the host and back in.

Executables of their own, beside the steps: they are seldom needed, and so neither the steps nor
those who write their own have to know of them. Compiled ahead of time, like the steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch import DeviceState, LayerPages
from jaxserve.swap import Move
from pallas_kernels.native.attention import write_kv_native
from pallas_kernels.native.build import has_native

Layers = tuple[LayerPages, ...]

CHUNK = 16
"""Pages per call."""
NO_PAGE = np.iinfo(np.int32).max
"""Writing to this page does nothing."""


class PageMover:
    """Moves pages of one shape of state. Holds what was swapped out, by sequence.

    Saving is asynchronous: pages are gathered on the device in order with the steps, and travel
    to the host while the next step runs. `settle` waits for them.
    """

    def __init__(self, state: DeviceState) -> None:
        """Compiles for a state like this one, unless that was done before."""
        leaves, structure = jax.tree.flatten(state.layers)
        specs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves)
        self._run = _compile(structure, specs)
        self._saved: dict[object, list[np.ndarray]] = {}
        self._leaving: dict[object, list[Layers]] = {}

    def copy(self, state: DeviceState, copies: Seq[tuple[int, int]]) -> DeviceState:
        """Copy pages (from, to) within the cache. Consumes the state, returns the new one.

        A page may be evicted to be the target of a later copy than the one that reads it, never of
        an earlier one: copying in order, each call reading before it writes, is right.
        """
        layers = state.layers
        for start in range(0, len(copies), CHUNK):
            source, target = zip(*copies[start : start + CHUNK], strict=True)
            layers = self._run.copy(layers, _padded(source, fill=0), _padded(target, fill=NO_PAGE))
        return DeviceState(layers, state.last_token, state.rules)

    def move(self, state: DeviceState, moves: Seq[Move]) -> DeviceState:
        """Make the moves in order. Consumes the state, returns the new one."""
        layers = state.layers
        for move in moves:
            if move.way == "out":
                self._leaving[move.sequence] = self._gather(layers, move.pages)
                continue
            self.settle()
            if move.way == "in":
                layers = self._scatter(layers, move)
            else:
                del self._saved[move.sequence]
        return DeviceState(layers, state.last_token, state.rules)

    def settle(self) -> None:
        """Wait until everything that was saved is on the host, and free its device copies."""
        for name, chunks in self._leaving.items():
            leaves = zip(*(jax.tree.leaves(chunk) for chunk in chunks), strict=True)
            self._saved[name] = [np.concatenate([np.asarray(x) for x in leaf]) for leaf in leaves]
        self._leaving.clear()

    def _gather(self, layers: Layers, pages: tuple[int, ...]) -> list[Layers]:
        chunks = []
        for start in range(0, len(pages), CHUNK):
            chunk = self._run.read(layers, _padded(pages[start : start + CHUNK], fill=0))
            for leaf in jax.tree.leaves(chunk):
                leaf.copy_to_host_async()
            chunks.append(chunk)
        return chunks

    def _scatter(self, layers: Layers, move: Move) -> Layers:
        saved, structure = self._saved[move.sequence], jax.tree.structure(layers)
        for start in range(0, len(move.pages), CHUNK):
            pages = _padded(move.pages[start : start + CHUNK], fill=NO_PAGE)
            rows = np.minimum(move.first + start + np.arange(CHUNK), len(saved[0]) - 1)
            new = jax.tree.unflatten(structure, [leaf[rows] for leaf in saved])
            layers = self._run.write(layers, pages, jax.device_put(new))
        return layers


class _Executables(NamedTuple):
    copy: Any
    read: Any
    write: Any


@functools.cache
def _compile(
    structure: jax.tree_util.PyTreeDef, leaves: tuple[jax.ShapeDtypeStruct, ...]
) -> _Executables:
    layers = jax.tree.unflatten(structure, leaves)
    pages = jax.ShapeDtypeStruct((CHUNK,), jnp.int32)
    moved = jax.eval_shape(_read, layers, pages)
    return _Executables(
        copy=jax.jit(_copy, donate_argnums=0).lower(layers, pages, pages).compile(),
        read=jax.jit(_read).lower(layers, pages).compile(),
        write=jax.jit(_write, donate_argnums=0).lower(layers, pages, moved).compile(),
    )


def _copy(layers: Layers, source: jax.Array, target: jax.Array) -> Layers:
    return _write(layers, target, _read(layers, source))


def _read(layers: Layers, pages: jax.Array) -> Layers:
    """Pages i32[CHUNK] of every layer: k and v of [CHUNK, B, K, D]."""
    return jax.tree.map(lambda cache: jnp.take(cache, pages, axis=0, mode="clip"), layers)


def _write(layers: Layers, pages: jax.Array, new: Layers) -> Layers:
    """`layers` with `new` at pages i32[CHUNK], in place."""
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and layers[0].k.dtype.itemsize == 2 and has_native():
        return tuple(_write_natively(*layer, pages) for layer in zip(layers, new, strict=True))
    return jax.tree.map(lambda cache, page: cache.at[pages].set(page, mode="drop"), layers, new)


def _write_natively(layer: LayerPages, new: LayerPages, pages: jax.Array) -> LayerPages:
    """XLA for CPUs scatters bfloat16 by way of float32: a copy of the whole cache, there and back.
    A page is so many tokens to the kernel that writes those."""
    num_pages, page_size = layer.k.shape[:2]
    slots = jnp.minimum(pages, num_pages)[:, None] * page_size + jnp.arange(page_size)[None]
    k, v = (x.reshape(-1, *x.shape[2:]) for x in (new.k, new.v))
    return LayerPages(*write_kv_native((layer.k, layer.v), k, v, slots.reshape(-1)))


def _padded(pages: Seq[int], *, fill: int) -> np.ndarray:
    ids = np.full(CHUNK, fill, np.int32)
    ids[: len(pages)] = pages
    return ids
