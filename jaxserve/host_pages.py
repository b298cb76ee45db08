"""Cache pages on the host: copied out of the device state and back into it, a few at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch import DeviceState, LayerPages
from jaxserve.swap import Move

CHUNK = 16
"""Pages per call of the two executables below."""
NO_PAGE = np.iinfo(np.int32).max


class HostPages:
    """What was swapped out, by sequence.

    Saving is asynchronous: the pages are gathered on the device in order with the steps, and
    travel to the host while the next step runs. `settle` waits for them.
    """

    def __init__(self) -> None:
        self._saved: dict[object, list[np.ndarray]] = {}
        self._leaving: dict[object, list[Any]] = {}

    def move(self, state: DeviceState, moves: tuple[Move, ...]) -> DeviceState:
        """Make the moves in order. Consumes the state and returns the new one."""
        for move in moves:
            if move.way == "out":
                self._leaving[move.sequence] = self._gather(state, move.pages)
            elif move.way == "in":
                self.settle()
                state = self._scatter(state, move)
            else:
                self.settle()
                del self._saved[move.sequence]
        return state

    def settle(self) -> None:
        """Wait until everything that was saved is on the host, and free its device copies."""
        for name, chunks in self._leaving.items():
            leaves = zip(*(jax.tree.leaves(chunk) for chunk in chunks), strict=True)
            self._saved[name] = [np.concatenate([np.asarray(x) for x in leaf]) for leaf in leaves]
        self._leaving.clear()

    def warm_up(self, state: DeviceState) -> DeviceState:
        """Compile both directions, so that serving never compiles. Changes no page."""
        layers = _read(state, np.zeros(CHUNK, np.int32))
        return _write(state, np.full(CHUNK, NO_PAGE, np.int32), layers)

    def _gather(self, state: DeviceState, pages: tuple[int, ...]) -> list[Any]:
        chunks = []
        for start in range(0, len(pages), CHUNK):
            ids = _padded(pages[start : start + CHUNK], fill=0)
            chunk = _read(state, ids)
            for leaf in jax.tree.leaves(chunk):
                leaf.copy_to_host_async()
            chunks.append(chunk)
        return chunks

    def _scatter(self, state: DeviceState, move: Move) -> DeviceState:
        saved, tree = self._saved[move.sequence], jax.tree.structure(state.layers)
        for start in range(0, len(move.pages), CHUNK):
            ids = _padded(move.pages[start : start + CHUNK], fill=NO_PAGE)
            rows = np.minimum(move.first + start + np.arange(CHUNK), len(saved[0]) - 1)
            layers = jax.tree.unflatten(tree, [leaf[rows] for leaf in saved])
            state = _write(state, ids, jax.device_put(layers))
        return state


@jax.jit
def _read(state: DeviceState, pages: jax.Array) -> tuple[LayerPages, ...]:
    """Pages i32[CHUNK] of every layer, each k and v [CHUNK, B, K, D]."""
    return jax.tree.map(lambda x: jnp.take(x, pages, axis=0, mode="clip"), state.layers)


@partial(jax.jit, donate_argnums=0)
def _write(state: DeviceState, pages: jax.Array, layers: tuple[LayerPages, ...]) -> DeviceState:
    """The state with `layers` written to pages i32[CHUNK], in place; NO_PAGE writes nothing."""

    def write(cache: jax.Array, new: jax.Array) -> jax.Array:
        return cache.at[pages].set(new, mode="drop")

    return DeviceState(jax.tree.map(write, state.layers, layers), state.last_token)


def _padded(pages: tuple[int, ...], *, fill: int) -> np.ndarray:
    ids = np.full(CHUNK, fill, np.int32)
    ids[: len(pages)] = pages
    return ids
