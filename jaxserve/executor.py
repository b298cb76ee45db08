"""Compiled steps on a device. The scheduler's side of it is two calls: launch, then collect."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from llguidance import LLMatcher

from checkpoints.model_config import ModelConfig
from jaxserve.batch import BatchDescriptor, DeviceState, PageTable, StepOutput, StepShape
from jaxserve.mask_writer import MaskWriter
from jaxserve.models.attention import empty_pages
from jaxserve.models.llama import Params
from jaxserve.packing import choose_shape, pack
from jaxserve.page_mover import PageMover
from jaxserve.request import PromptLogprob
from jaxserve.rule_writer import RuleWriter, empty_rules
from jaxserve.sequence import Drawn, Span
from jaxserve.step import StepFn, compile_step
from jaxserve.swap import Move

Progress = Callable[[str, int, int], None]
"""Told (what is done, how many, of how many)."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step, all laid out.

    Attributes:
        spans: its rows in order.
        constrained: (slot, matcher) of the rows that may not draw every token.
        awaits_tokens: what they may draw depends on a token that the host has not seen.
        shape: what it runs at. batch, page_table: its arguments.
    """

    spans: tuple[Span, ...]
    constrained: tuple[tuple[int, LLMatcher], ...]
    awaits_tokens: bool
    shape: StepShape
    batch: BatchDescriptor
    page_table: PageTable


@dataclass(frozen=True, slots=True)
class Launched:
    """A step the device has been given.

    Attributes:
        spans: its rows in order.
        output: its results, not yet waited for.
        started: `time.perf_counter()` at launch.
    """

    spans: tuple[Span, ...]
    output: StepOutput
    started: float


class Executor(Protocol):
    """Runs spans. One step at a time may be in flight ahead of the one being collected, and each
    is launched before the next is prepared."""

    def move(self, moves: tuple[Move, ...]) -> None:
        """Move pages between device and host before the next step does anything else."""
        ...

    def prepare(self, spans: tuple[Span, ...]) -> Prepared:
        """Lay a step out."""
        ...

    def launch(self, prepared: Prepared) -> Launched:
        """Hand a step to the device and return without waiting for it.

        Rows with a constraint draw what their matchers allow at this moment.
        """
        ...

    def is_done(self, launched: Launched) -> bool:
        """Whether a step's results are there."""
        ...

    def collect(self, launched: Launched) -> list[Drawn]:
        """Wait for a step; one result per span."""
        ...


class JaxExecutor:
    """Ahead-of-time compiled steps, one per shape, over a device state it owns."""

    def __init__(
        self, params: Params, state: DeviceState, steps: dict[StepShape, jax.stages.Compiled]
    ) -> None:
        """Compiles what moves pages and writes rules, so that serving never compiles.

        Args:
            params: stay on the device for good.
            state: given away: every launch consumes it and keeps the new one.
            steps: from `compile_steps`.
        """
        self._params = params
        self._state = state
        self._steps = steps
        self._shapes = tuple(sorted(steps))
        self._mover = PageMover(state)
        self._rules = RuleWriter(state)
        self._masks = MaskWriter(state)
        self.last_aux: object = ()

    def move(self, moves: tuple[Move, ...]) -> None:
        self._state = self._mover.move(self._state, moves)

    def prepare(self, spans: tuple[Span, ...]) -> Prepared:
        copies = [span.copy for span in spans if span.copy is not None]
        self._state = self._mover.copy(self._state, copies)
        self._state = self._rules.write(self._state, spans)
        shape = choose_shape(self._shapes, spans)
        batch, page_table = jax.device_put(pack(spans, shape))
        constrained = tuple(
            (span.sequence.slot, span.sequence.matcher)
            for span in spans
            if span.draws and span.sequence.matcher is not None
        )
        awaits_tokens = bool(constrained) and any(
            span.feed and span.sequence.matcher is not None for span in spans
        )
        return Prepared(spans, constrained, awaits_tokens, shape, batch, page_table)

    def launch(self, prepared: Prepared) -> Launched:
        started = time.perf_counter()
        self._state = self._masks.write(self._state, prepared.constrained)
        output, self._state = self._steps[prepared.shape](
            self._params, self._state, prepared.batch, prepared.page_table
        )
        return Launched(prepared.spans, output, started)

    def is_done(self, launched: Launched) -> bool:
        return bool(launched.output.token_ids.is_ready())  # type: ignore[attr-defined]

    def collect(self, launched: Launched) -> list[Drawn]:
        output = launched.output
        self._mover.settle()
        self.last_aux = output.aux
        token_ids = np.asarray(output.token_ids).tolist()
        prompts, pooled = self._prompt_logprobs(launched), self._pooled(launched)
        wanted = [span.sequence.request.sampling.top_logprobs for span in launched.spans]
        if all(top is None for top in wanted):
            return [
                Drawn(token_id, prompt_logprobs=prompts.get(row, ()), pooled=pooled.get(row))
                for row, token_id in enumerate(token_ids[: len(wanted)])
            ]
        logprobs, top_ids, top_logprobs = (
            np.asarray(x).tolist() for x in (output.logprobs, output.top_ids, output.top_logprobs)
        )
        return [
            Drawn(token_ids[row], prompt_logprobs=prompts.get(row, ()), pooled=pooled.get(row))
            if top is None
            else Drawn(
                token_ids[row],
                logprobs[row],
                tuple(zip(top_ids[row][:top], top_logprobs[row][:top], strict=True)),
                prompts.get(row, ()),
            )
            for row, top in enumerate(wanted)
        ]

    def _pooled(self, launched: Launched) -> dict[int, np.ndarray]:
        """f32[E] of the rows that ask."""
        rows = [row for row, span in enumerate(launched.spans) if span.pools is not None]
        if not rows or isinstance(launched.output.pooled, tuple):
            return {}
        vectors = np.asarray(launched.output.pooled)
        return {row: vectors[row].copy() for row in rows}

    def _prompt_logprobs(self, launched: Launched) -> dict[int, tuple[PromptLogprob, ...]]:
        """Of the rows that ask."""
        scores, found = launched.output.prompt, {}
        if not any(span.scores_prompt for span in launched.spans) or isinstance(scores, tuple):
            return {}
        logprobs, ids, best = map(
            np.asarray, (scores.logprobs, scores.top_ids, scores.top_logprobs)
        )
        start = 0
        for row, span in enumerate(launched.spans):
            if span.scores_prompt:
                top = span.sequence.request.sampling.prompt_logprobs
                stop = start + min(span.stop, span.sequence.num_prompt - 1) - span.start
                found[row] = tuple(
                    PromptLogprob(logprob, tuple(zip(ids[:top], best[:top], strict=True)))
                    for logprob, ids, best in zip(
                        *(x[start:stop].tolist() for x in (logprobs, ids, best)), strict=True
                    )
                )
            start += span.num_tokens
        return found


def empty_state(
    config: ModelConfig, *, num_pages: int, page_size: int, max_rows: int, dtype: jnp.dtype
) -> DeviceState:
    """A device state with nothing in it: num_pages pages of cache in `dtype`, max_rows slots."""
    layers = empty_pages(config, num_pages, page_size, dtype)
    rules = empty_rules(max_rows, config.vocab_size)
    return DeviceState(layers, jnp.zeros(max_rows, jnp.int32), rules)


def compile_steps(
    step: StepFn,
    params: Params,
    state: DeviceState,
    shapes: Seq[StepShape],
    *,
    threads: int = 2,
    progress: Progress | None = None,
) -> dict[StepShape, jax.stages.Compiled]:
    """Compile every shape, largest first, several at a time (XLA works outside the GIL).

    Args:
        step: the step function.
        params: arrays, or `jax.ShapeDtypeStruct`s of them.
        state: likewise. Not consumed.
        shapes: what to compile for.
        threads: compilations at a time.
        progress: told after each.
    """
    compiled: dict[StepShape, jax.stages.Compiled] = {}

    def compile_one(shape: StepShape) -> None:
        batch, page_table = pack((), shape)
        compiled[shape] = compile_step(step, params, state, batch, page_table)
        if progress is not None:
            progress(f"compiled a step of {shape.num_tokens} tokens", len(compiled), len(shapes))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(compile_one, sorted(shapes, reverse=True)))
    return compiled
