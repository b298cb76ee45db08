"""The whole step of a model of random weights, against the roofline at the measured rates."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import cast

import jax

from bench.gpu.model import PAGE_SIZE, RandomModel, random_model
from bench.gpu.stage import Given, Rates
from bench.gpu.timing import prepare, timed
from bench.measure import Point, rounded
from jaxserve.batch import NULL_PAGE, BatchDescriptor, DeviceState, PageTable
from jaxserve.cards import Card, Dtype
from jaxserve.models.llama import Params
from jaxserve.packing import pack
from jaxserve.request import Request, SamplingParams
from jaxserve.roofline import Roofline, model_shape
from jaxserve.sequence import Sequence, Span
from jaxserve.step import compile_step


def run(given: Given) -> Iterator[Point]:
    """A point a step."""
    prepare(given)
    model = random_model()
    state = model.state
    for kind, tokens in model.sizes.steps:
        spans = prompt(model, tokens) if kind == "prefill" else decodes(model, tokens)
        batch, page_table = jax.device_put(pack(spans, model.shapes[tokens]))
        compiled = compile_step(model.step, model.params, state, batch, page_table)

        seconds, state = timed(partial(launch, compiled, model.params, batch, page_table), state)
        yield {"model": model.name, "step": kind, **point(model, spans, seconds, given.rates)}


def launch(
    compiled: jax.stages.Compiled,
    params: Params,
    batch: BatchDescriptor,
    page_table: PageTable,
    state: DeviceState,
) -> DeviceState:
    """A step of which only the state is wanted: it holds the tokens drawn."""
    after: DeviceState = compiled(params, state, batch, page_table)[1]
    return after


def decodes(model: RandomModel, rows: int) -> tuple[Span, ...]:
    """The next token of each row, half way through its context if there are pages for that."""
    pages = min(model.sizes.max_context // PAGE_SIZE // 2, (model.num_pages - 1) // rows)
    context = pages * PAGE_SIZE
    return tuple(span(model, row, row * pages, context - 1, context) for row in range(rows))


def prompt(model: RandomModel, tokens: int) -> tuple[Span, ...]:
    """A whole prompt."""
    return (span(model, 0, 0, 0, tokens),)


def span(model: RandomModel, slot: int, num_before: int, start: int, stop: int) -> Span:
    """Tokens [start, stop) of a sequence of random tokens, behind `num_before` pages of others."""
    rng = Random(slot)
    tokens = [rng.randrange(model.config.vocab_size) for _ in range(stop)]
    first = NULL_PAGE + 1 + num_before
    sequence = Sequence(
        Request(str(slot), tuple(tokens), SamplingParams(max_tokens=1)),
        tokens=array("i", tokens),
        pages=array("i", range(first, first + -(-stop // PAGE_SIZE))),
        slot=slot,
    )
    return Span(sequence, start, stop, feed=False, draws=True)


def point(
    model: RandomModel, spans: tuple[Span, ...], seconds: float, rates: Rates | None
) -> Point:
    """Milliseconds, and what part of that the roofline says it has to take."""
    tokens, context = sum(each.num_tokens for each in spans), spans[0].stop
    made: Point = {
        "tokens": tokens,
        "context": context,
        "step_ms": rounded(seconds * 1e3),
        "tokens_per_s": rounded(tokens / seconds),
    }
    if rates is not None:
        best = predicted(model, spans, rates)
        made |= {"roofline_ms": rounded(best * 1e3), "roofline_share": rounded(best / seconds)}
    return made


def predicted(model: RandomModel, spans: tuple[Span, ...], rates: Rates) -> float:
    """Seconds that the card takes for the step at the rates it was measured to have."""
    card = Card("measured", "as measured", 0.0, rates.bandwidth, *[rates.flops] * 3)
    dtype = cast(Dtype, model.dtype.name)
    shape = model_shape(model.name, model.config, weight_dtype=dtype, kv_dtype=dtype)
    roofline = Roofline(shape, card, mfu=1.0)
    work = [shape.span(each.start, each.stop) for each in spans]
    return roofline.work_seconds(sum(work[1:], start=work[0]))
