"""Engines over the tiny checkpoints, and the oracle they are held to."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fixture_files import TINY

import checkpoints
from jaxserve.batch import BatchDescriptor, DeviceState, StepShape
from jaxserve.engine import Engine
from jaxserve.executor import JaxExecutor, compile_steps, empty_state
from jaxserve.models.attention import PagedAttention, cache_dtype
from jaxserve.models.decoder import Decoder
from jaxserve.models.packed import pack_params
from jaxserve.packing import pack, step_shapes
from jaxserve.pages import PagePool
from jaxserve.request import Request, SamplingParams, TokenEvent
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Sequence as Row
from jaxserve.sequence import Span
from jaxserve.step import make_step
from jaxserve.swap import SwapCost, SwapSpace

PAGE_SIZE = 16
MAX_CONTEXT = 512
MAX_ROWS = 8
NUM_PAGES = 161
ORACLE_TOKENS = 176  # one padded shape for every text the oracle is asked about
FAMILIES = sorted(folder.name for folder in TINY.iterdir())


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory."""

    decoder: Decoder
    params: Any


DEFAULT_ATTENTION = PagedAttention()


@functools.cache
def tiny(name: str, attention: PagedAttention = DEFAULT_ATTENTION) -> Loaded:
    """One of the tiny checkpoints, in float32; its weights are packed for native attention."""
    checkpoint = checkpoints.open_checkpoint(str(TINY / name), checkpoints.Store(TINY / "none"))
    params = checkpoint.load(dtype=jnp.float32)
    if attention.kind == "native":
        params = pack_params(params, tied_head=checkpoint.config.tied_head)
    return Loaded(Decoder(checkpoint.config, attention), params)


def new_state(
    loaded: Loaded, num_pages: int = NUM_PAGES, fill: float = 0.0, kv: str = "auto"
) -> DeviceState:
    state = empty_state(
        loaded.decoder.config,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_rows=MAX_ROWS,
        dtype=cache_dtype(kv, jnp.dtype(jnp.float32)),
    )
    layers = jax.tree.map(lambda x: jnp.full_like(x, fill), state.layers)
    return state.replace(layers=layers)


@functools.cache
def compiled(
    name: str,
    num_pages: int = NUM_PAGES,
    budget: int = 64,
    attention: PagedAttention = DEFAULT_ATTENTION,
    kv: str = "auto",
) -> dict[StepShape, jax.stages.Compiled]:
    loaded = tiny(name, attention)
    shapes = step_shapes(
        max_rows=MAX_ROWS, token_budget=budget, max_context=MAX_CONTEXT, page_size=PAGE_SIZE
    )
    shapes = (shapes[2], shapes[-1])  # 8 tokens and the budget: two compilations do for tests
    step = make_step(loaded.decoder)
    return compile_steps(step, loaded.params, new_state(loaded, num_pages, kv=kv), shapes)


def make_engine(
    name: str,
    *,
    num_pages: int = NUM_PAGES,
    usable_pages: int | None = None,
    token_budget: int = 64,
    look_ahead: bool = True,
    fill: float = 0.0,
    swap_pages: int = 0,
    prefix_reuse: bool = True,
    attention: PagedAttention = DEFAULT_ATTENTION,
    kv: str = "auto",
) -> Engine:
    """An engine on a tiny checkpoint. Executables are shared between engines of a shape.

    Args:
        usable_pages: pages the scheduler may hand out, if fewer than the device has.
        token_budget: of the scheduler; the compiled ladder goes up to 64.
        fill: what the cache holds at first.
        swap_pages: room for preempted sequences in host memory.
        prefix_reuse: sequences that begin alike share pages.
        attention: of the model's layers.
        kv: what the cache keeps, as `jaxserve serve --kv` says it.
    """
    loaded = tiny(name, attention)
    steps = compiled(name, num_pages, attention=attention, kv=kv)
    executor = JaxExecutor(loaded.params, new_state(loaded, num_pages, fill, kv), steps)
    pool = PagePool(usable_pages or num_pages, PAGE_SIZE)
    scheduler = Scheduler(
        pool,
        max_rows=MAX_ROWS,
        token_budget=token_budget,
        max_context=MAX_CONTEXT,
        prefix_reuse=prefix_reuse,
        swap=SwapSpace(pool, swap_pages, SwapCost(0.0, 1.0)),
    )
    return Engine(scheduler, executor, look_ahead=look_ahead)


def drain(engine: Engine) -> dict[str, list[TokenEvent]]:
    """Run until nothing is left; every request's events."""
    events: dict[str, list[TokenEvent]] = {}
    for _ in range(10_000):
        if not engine.has_work:
            break
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    assert not engine.has_work, "the engine made no progress"
    return events


def generate(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Run the requests together to their ends; every page must have come back."""
    for request in requests:
        engine.add(request)
    events = drain(engine)
    assert engine.scheduler.pool.num_live == 0
    assert all(each[-1].finish_reason in ("stop", "length") for each in events.values())
    return {
        key: [e.token_id for e in each if e.token_id is not None] for key, each in events.items()
    }


def request(name: str, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Request:
    return Request(name, tuple(int(t) for t in prompt), SamplingParams(max_tokens, **sampling))


def all_logits(
    loaded: Loaded,
    tokens: Sequence[int],
    attention: PagedAttention | None = None,
    kv: str = "auto",
) -> np.ndarray:
    """f32[len(tokens), V]: logits at every position, computed through the paged cache at once."""
    run = _forward(loaded.decoder.config, attention or PagedAttention())
    shape = StepShape(ORACLE_TOKENS, 2, ORACLE_TOKENS // PAGE_SIZE, PAGE_SIZE)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    row = Row(request("oracle", tokens, 1), array("i", tokens), slot=0)
    assert pool.grow(row.pages, len(tokens))
    batch, table = pack([Span(row, 0, len(tokens), feed=False, draws=True)], shape)

    layers = new_state(loaded, kv=kv).layers
    logits = run(loaded.params, layers, *jax.device_put((batch, table)))
    return np.asarray(logits)[: len(tokens)]


@functools.cache
def _forward(config: checkpoints.ModelConfig, attention: PagedAttention) -> Any:
    decoder = Decoder(config, attention)

    @jax.jit
    def run(params: Any, layers: Any, batch: BatchDescriptor, table: Any) -> jax.Array:
        hidden, _ = decoder.forward(params, layers, batch.token_ids, batch, table)
        return decoder.unembed(params, hidden)

    return run
