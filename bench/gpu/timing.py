"""How anything is timed on a device, and what it is timed with."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.mosaic import make_threads
from bench.gpu.stage import Given
from jaxserve.aot.target import settle_for_cpu
from jaxserve.startup import use_compilation_cache

Carry = TypeVar("Carry")

GROUPS = 5
GROUP_SECONDS = 0.05
"""Calls are timed in groups of about so long."""
MAX_CALLS = 200


def prepare(given: Given) -> None:
    """What every stage does before it uses jax."""
    settle_for_cpu()
    make_threads()
    use_compilation_cache(given.cache)


def on_gpu() -> bool:
    """Whether what is timed here means anything."""
    return jax.default_backend() == "gpu"


def timed(call: Callable[[Carry], Carry], carry: Carry) -> tuple[float, Carry]:
    """Seconds of a call, the median over groups of calls, and what the last one returned.

    Each call takes what the one before it returned, so they run one after the other, but nobody
    waits between them: launching counts only as far as it takes longer than the work.
    """
    for _ in range(2):  # the first one compiles
        started = time.perf_counter()
        carry = jax.block_until_ready(call(carry))
    once = time.perf_counter() - started
    calls = min(MAX_CALLS, max(1, int(GROUP_SECONDS / once))) if on_gpu() else 1
    groups = []
    for _ in range(GROUPS):
        started = time.perf_counter()
        for _ in range(calls):
            carry = call(carry)
        jax.block_until_ready(carry)
        groups.append((time.perf_counter() - started) / calls)
    return statistics.median(groups), carry


def random(
    seed: int,
    shape: tuple[int, ...],
    dtype: Any = jnp.bfloat16,
    *,
    mean: float = 0.0,
    deviation: float = 1.0,
) -> jax.Array:
    """Uniform numbers, made on the device. A card draws less power for zeros, and is faster."""
    make = _uniform(shape, jnp.dtype(dtype))
    half = deviation * 3**0.5
    x: jax.Array = make(np.uint32(seed), np.float32(mean - half), np.float32(mean + half))
    return x


@functools.cache
def _uniform(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    def make(seed: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
        key = jax.random.key(seed, impl="rbg")
        return jax.random.uniform(key, shape, dtype, low.astype(dtype), high.astype(dtype))

    return jax.jit(make)
