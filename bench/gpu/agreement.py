"""Every kernel, compiled for the device, held to the float32 reference at awkward places."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.mosaic import mosaic_target
from bench.gpu.stage import Given
from bench.gpu.timing import on_gpu, prepare, random
from bench.measure import Point, rounded
from pallas_kernels.cache_write import copy_pages, write_kv
from pallas_kernels.mosaic.support import Wanted
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.reference import dequantised, quantised
from pallas_kernels.target import Target, local_target

Rows = list[tuple[int, int]]
"""(tokens in the step, tokens in the cache after it) of each row."""

PACKINGS: dict[str, Rows] = {
    "decode": [(1, 1), (1, 17), (0, 0), (1, 512), (1, 513), (1, 1023)],
    "prefill": [(15, 15), (33, 33), (0, 0), (40, 513)],
    "mixed": [(1, 33), (17, 17), (1, 1), (3, 258), (1, 513), (31, 1023)],
}
# One padded shape for all packings, so that each setting compiles once.
TOKENS, NUM_ROWS, MAX_KEYS = 96, 8, 1024
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}
REFERENCE = Target("reference")


@dataclass(frozen=True, slots=True)
class Setting:
    """What a compiled kernel depends on besides the padded shape."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    dtype: str = "bfloat16"
    int8: bool = False

    @property
    def wanted(self) -> Wanted:
        """What is asked of the kernels for Hopper."""
        dtype = jnp.dtype(self.dtype)
        pages_dtype = jnp.dtype(jnp.int8) if self.int8 else dtype
        group = self.num_heads // self.num_kv_heads
        return Wanted(self.head_dim, group, self.page_size, dtype, pages_dtype)

    def __str__(self) -> str:
        cache = "int8" if self.int8 else self.dtype
        limits = f"window {self.window}, soft cap {self.soft_cap}"
        return f"{self.num_heads}:{self.num_kv_heads} x {self.head_dim}, {cache}, {limits}"


SETTINGS = [
    Setting(32, 8, 128),
    Setting(32, 8, 128, int8=True),
    Setting(6, 2, 64, window=24, dtype="float32"),
    Setting(8, 1, 80, page_size=32, soft_cap=4.0),
    Setting(4, 1, 256, window=500),
]
INTERPRETED = [
    Setting(4, 2, 64, window=24, dtype="float32", int8=True),
    Setting(4, 2, 64),
]


def run(given: Given) -> Iterator[Point]:
    """A point a comparison. Mosaic's come last: a kernel that hangs, or leaves an error that the
    process cannot clear, takes with it only what follows."""
    prepare(given)
    target = local_target("triton")
    settings = SETTINGS if on_gpu() else INTERPRETED
    for setting in settings:
        yield from attention(setting, target)
        yield from cache_write(setting, target)
    pages = random(7, (6, 16, 3, 80))
    # Page 1 is read before it is written; 9 is no page.
    moves = jnp.array([[1, 3, 0], [2, 1, 9]], jnp.int32)
    got, want = (jax.jit(partial(copy_pages, target=t))(pages, *moves) for t in (target, REFERENCE))
    error = float(jnp.max(jnp.abs(got - want)))
    yield comparison("copy_pages", target, "in order", "6 pages", error, 0.0)
    for setting in settings:
        if mosaic := mosaic_target(setting.wanted):
            yield from attention(setting, mosaic)


def attention(setting: Setting, target: Target) -> Iterator[Point]:
    """Paged attention over each of the packings."""
    limits: dict[str, Any] = {"window": setting.window, "soft_cap": setting.soft_cap}
    scale = 1.5 * setting.head_dim**-0.5

    attend, reference = (
        jax.jit(partial(paged_attention, **limits, scale=scale, target=t))
        for t in (target, REFERENCE)
    )
    for name, rows in PACKINGS.items():
        arrays = operands(rows, setting)
        # The reference gets the same numbers in float32, and is not rounded at the end.
        exact = {
            key: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
            for key, x in arrays.items()
        }
        used = sum(tokens for tokens, _ in rows)
        got = np.asarray(attend(**arrays), np.float32)[:used]
        want = np.asarray(reference(**exact))[:used]
        error = float(np.max(np.abs(got - want)))
        tolerance = TOLERANCE[setting.dtype]
        yield comparison("paged_attention", target, name, str(setting), error, tolerance)


def operands(rows: Rows, setting: Setting) -> dict[str, jax.Array]:
    """A step as `paged_attention` takes it: NaN wherever nobody owns anything."""
    rng = np.random.default_rng(len(rows))
    padded = rows + [(0, 0)] * (NUM_ROWS - len(rows))
    size, max_pages = setting.page_size, MAX_KEYS // setting.page_size
    need = [-(-kv // size) for _, kv in padded]
    num_pages = 3 * max_pages
    free = iter(rng.permutation(np.arange(1, num_pages)).tolist())
    table = np.zeros((NUM_ROWS, max_pages), np.int32)
    cache = np.full((2, num_pages, size, setting.num_kv_heads, setting.head_dim), np.nan)
    for row, (_, kv) in enumerate(padded):
        for page in range(need[row]):
            table[row, page] = next(free)
            owned = cache[:, table[row, page], : kv - page * size]
            owned[:] = rng.standard_normal(owned.shape)
    q = rng.standard_normal((TOKENS, setting.num_heads, setting.head_dim))
    lengths = np.array(padded, np.int32)
    arrays = {
        "q": jnp.asarray(q, setting.dtype),
        "page_table": jnp.asarray(table),
        "row_start": jnp.asarray(np.concatenate([[0], lengths[:, 0].cumsum()]), jnp.int32),
        "kv_len": jnp.asarray(lengths[:, 1]),
    }
    for name, x in zip("kv", cache, strict=True):
        if setting.int8:
            arrays[f"{name}_pages"], arrays[f"{name}_scale"] = jax.jit(quantised)(jnp.asarray(x))
        else:
            arrays[f"{name}_pages"] = jnp.asarray(x, setting.dtype)
    return arrays


def cache_write(setting: Setting, target: Target) -> Iterator[Point]:
    """`write_kv`: bits where nothing is quantised, else steps of an int8 vector's own scale."""
    shape = (5, setting.page_size, setting.num_kv_heads, setting.head_dim)
    places = shape[0] * shape[1]
    slots = jnp.array([17, places, places - 1, 0, places], jnp.int32)  # `places` drops the token
    k, v = (random(seed, (slots.size, *shape[2:]), setting.dtype) for seed in (3, 4))
    pages: tuple[jax.Array, ...] = tuple(random(seed, shape, setting.dtype) for seed in (5, 6))
    if setting.int8:
        (k8, k_scale), (v8, v_scale) = map(jax.jit(quantised), pages)
        pages = (k8, v8, k_scale, v_scale)
    got, want = (
        jax.jit(partial(write_kv, target=t))(pages, k, v, slots) for t in (target, REFERENCE)
    )
    if setting.int8:
        errors = [
            jnp.abs(dequantised(got[i], got[i + 2], jnp.float32) / want[i + 2][..., None] - want[i])
            for i in range(2)
        ]
    else:
        errors = [jnp.abs(a.astype(jnp.float32) - b) for a, b in zip(got, want, strict=True)]
    error = max(float(jnp.max(x)) for x in errors)
    tolerance = 1.01 if setting.int8 else 0.0
    yield comparison("write_kv", target, "5 tokens", str(setting), error, tolerance)


def comparison(
    kernel: str, target: Target, case: str, setting: str, error: float, tolerance: float
) -> Point:
    """The largest error, NaN included, against what it may be."""
    return {
        "kernel": kernel,
        "dialect": target.dialect,
        "case": case,
        "setting": setting,
        "error": rounded(error) if math.isfinite(error) else str(error),
        "tolerance": tolerance,
        "agrees": error <= tolerance,
    }
