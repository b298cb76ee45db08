"""How long kernels take, beside plain jnp and cuDNN, and what share of the card's rates that is.

On a GPU every decode has more keys and values than a card's caches hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.mosaic import mosaic_target
from bench.gpu.stage import Given, Rates
from bench.gpu.timing import on_gpu, prepare, random, timed
from bench.measure import Point, rounded
from pallas_kernels.cache_write import copy_pages, write_kv
from pallas_kernels.mosaic.support import Wanted
from pallas_kernels.paged_attention import paged_attention, plan_attention
from pallas_kernels.reference import quantised
from pallas_kernels.target import Target, local_target

PAGE_SIZE = 16
Call = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class Work:
    """Rows of one length. Heads as in Llama 3.1 8B, unless told otherwise.

    Attributes:
        rows: R. tokens: of each row in the step; 1 is a decode. kv_len: of each row in the cache.
        int8: the cache.
        num_heads: H. num_kv_heads: K. head_dim: D.
    """

    rows: int
    tokens: int
    kv_len: int
    int8: bool = False
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def wanted(self) -> Wanted:
        """What is asked of the kernels for Hopper."""
        group, dtype = self.num_heads // self.num_kv_heads, jnp.dtype(jnp.bfloat16)
        pages_dtype = jnp.dtype(jnp.int8) if self.int8 else dtype
        return Wanted(self.head_dim, group, PAGE_SIZE, dtype, pages_dtype)

    @property
    def kv_bytes(self) -> int:
        """Of keys and values, and their scales: what a decode cannot do without reading."""
        per_head = self.head_dim + 4 if self.int8 else 2 * self.head_dim
        return 2 * self.rows * self.kv_len * self.num_kv_heads * per_head

    @property
    def flops(self) -> int:
        """Of q.k and of probabilities times v, of the keys that a query sees."""
        seen = self.tokens * self.kv_len - self.tokens * (self.tokens - 1) // 2
        return 4 * self.num_heads * self.head_dim * self.rows * seen


ATTENTION = [
    Work(64, 1, 2048),
    Work(1, 1024, 1024),
    Work(256, 1, 1024),
    Work(64, 1, 2048, int8=True),
    Work(1, 1024, 8192),
    Work(1, 1, 32768),
    Work(8, 1, 8192),
    Work(4, 256, 256),
    Work(1, 4096, 4096),
    Work(128, 1, 8192),
    Work(256, 1, 1024, int8=True),
]
TINY = [Work(2, 1, 40, num_heads=4, num_kv_heads=2, head_dim=64)]


def run(given: Given) -> Iterator[Point]:
    """A point a kernel and size."""
    prepare(given)
    target = local_target("triton")
    for work in ATTENTION if on_gpu() else TINY:
        yield attention(work, target, given)
    heads = (8, 128) if on_gpu() else (2, 64)
    for tokens in (64, 1024) if on_gpu() else (8,):
        yield writing(tokens, heads, target, given.rates)
    yield copying(64 if on_gpu() else 2, heads, target, given.rates)


def attention(work: Work, target: Target, given: Given) -> Point:
    """Paged attention in every version, and attention over the same keys without pages."""
    arrays = operands(work)
    q = random(1, (work.rows * work.tokens, work.num_heads, work.head_dim))
    versions = {"triton": target}
    if given.mosaic and (mosaic := mosaic_target(work.wanted)):
        versions["mosaic"] = mosaic
    versions["jnp"] = Target("cpu")
    seconds = {name: timed(paged(work, arrays, at), q)[0] for name, at in versions.items()}
    # Without pages there is neither int8 nor a causal mask whose last query sees the last key.
    if not work.int8 and work.tokens in (1, work.kv_len):
        name: Literal["cudnn", "xla"] = "cudnn" if on_gpu() else "xla"
        try:
            seconds[name] = timed(contiguous(work, arrays, name), q)[0]
        except (NotImplementedError, RuntimeError, ValueError) as error:
            # A comparison that this card or cuDNN does not have is no fault of a kernel of ours.
            return point(work, seconds, given.rates) | {"cudnn_error": str(error).splitlines()[0]}
    return point(work, seconds, given.rates)


def operands(work: Work) -> dict[str, jax.Array]:
    """All but the queries, each row's pages spread over the cache."""
    per_row = -(-work.kv_len // PAGE_SIZE)
    shape = (1 + work.rows * per_row, PAGE_SIZE, work.num_kv_heads, work.head_dim)
    pages = 1 + np.random.default_rng(0).permutation(shape[0] - 1)
    arrays: dict[str, jax.Array] = jax.device_put(
        {
            "page_table": pages.reshape(work.rows, per_row).astype(np.int32),
            "row_start": np.arange(work.rows + 1, dtype=np.int32) * work.tokens,
            "kv_len": np.full(work.rows, work.kv_len, np.int32),
        }
    )
    for seed, name in enumerate(("k", "v"), 2):
        arrays[f"{name}_pages"] = random(seed, shape)
        if work.int8:
            quantise = jax.jit(quantised)
            arrays[f"{name}_pages"], arrays[f"{name}_scale"] = quantise(arrays[f"{name}_pages"])
    return arrays


def paged(work: Work, arrays: dict[str, jax.Array], target: Target) -> Call:
    """A layer's attention in one of our versions; the plan is the step's, and made before."""
    make_plan = partial(
        plan_attention,
        target=target,
        num_tokens=work.rows * work.tokens,
        num_heads=work.num_heads,
        page_table=arrays["page_table"],
        dtype=jnp.dtype(jnp.bfloat16),
    )
    plan = jax.jit(make_plan)(arrays["row_start"], arrays["kv_len"], pages=arrays["k_pages"])
    attend = jax.jit(partial(paged_attention, target=target, scale=work.head_dim**-0.5))
    return lambda q: attend(q, **arrays, plan=plan)


def contiguous(
    work: Work, arrays: dict[str, jax.Array], implementation: Literal["cudnn", "xla"]
) -> Call:
    """jax.nn's attention over the same keys and values, each row's gathered into one block."""

    def gather(pages: jax.Array, table: jax.Array) -> jax.Array:
        return pages[table].reshape(work.rows, -1, *pages.shape[2:])[:, : work.kv_len]

    k, v = (jax.jit(gather)(arrays[name], arrays["page_table"]) for name in ("k_pages", "v_pages"))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(
            q.reshape(work.rows, work.tokens, *q.shape[1:]),
            k,
            v,
            is_causal=work.tokens > 1,
            implementation=implementation,
        )
        return out.reshape(q.shape)

    run = jax.jit(attend)
    return lambda q: run(q, k, v)


def point(work: Work, seconds: dict[str, float], rates: Rates | None) -> Point:
    """Times in microseconds, each with its share of the rate that bounds it."""
    name = "decode" if work.tokens == 1 else "prefill"
    made: Point = {
        "kernel": f"{name} int8" if work.int8 else name,
        "rows": work.rows,
        "tokens": work.rows * work.tokens,
        "kv_len": work.kv_len,
    }
    for version, took in seconds.items():
        made[f"{version}_us"] = rounded(took * 1e6)
        if rates is not None:
            best = work.kv_bytes / rates.bandwidth if name == "decode" else work.flops / rates.flops
            made[f"{version}_share"] = rounded(best / took)
    return made


def writing(tokens: int, heads: tuple[int, int], target: Target, rates: Rates | None) -> Point:
    """`write_kv` of so many tokens, spread over the cache."""
    shape = (4096 if on_gpu() else 4, PAGE_SIZE, *heads)
    places = np.random.default_rng(0).permutation(shape[0] * PAGE_SIZE)[:tokens]
    places = jax.device_put(places.astype(np.int32))
    k, v = random(1, (tokens, *heads)), random(2, (tokens, *heads))

    def seconds(target: Target) -> float:
        write = jax.jit(partial(write_kv, target=target), donate_argnums=0)
        pages = (random(3, shape), random(4, shape))
        return timed(lambda pages: write(pages, k, v, places), pages)[0]

    return in_place("write_kv", tokens, 4 * k.nbytes, seconds, target, rates)


def copying(count: int, heads: tuple[int, int], target: Target, rates: Rates | None) -> Point:
    """`copy_pages` of so many pages."""
    moves = jax.device_put(np.arange(2 * count, dtype=np.int32).reshape(2, count))

    def seconds(target: Target) -> float:
        copy = jax.jit(partial(copy_pages, target=target), donate_argnums=0)
        pages = random(5, (2 * count, PAGE_SIZE, *heads))
        return timed(lambda pages: copy(pages, *moves), pages)[0]

    moved = 2 * count * PAGE_SIZE * heads[0] * heads[1] * 2
    return in_place("copy_pages", count * PAGE_SIZE, moved, seconds, target, rates)


def in_place(
    kernel: str,
    tokens: int,
    moved: int,
    seconds: Callable[[Target], float],
    target: Target,
    rates: Rates | None,
) -> Point:
    """A kernel that changes the cache, in both versions; `moved` bytes are read and written."""
    made: Point = {"kernel": kernel, "tokens": tokens}
    for version, which in (("triton", target), ("jnp", Target("cpu"))):
        took = seconds(which)
        made[f"{version}_us"] = rounded(took * 1e6)
        if rates is not None:
            made[f"{version}_share"] = rounded(moved / rates.bandwidth / took)
    return made
