"""The engine alone, in this process: no HTTP, no tokenizer, no second process.

python -m bench.offline MODEL --concurrency 1 8 32 64 --json results.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from rich.console import Console

from bench.measure import (
    WARM_UP_TOKENS,
    BenchError,
    Point,
    Round,
    Timeline,
    add_flags,
    engine_flags,
    facts,
    figures,
    print_table,
    random_prompts,
    rounded,
    write_point,
)
from bench.program import exit_code
from jaxserve.batch import StepShape
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.executor import Executor, Launched, Prepared
from jaxserve.packing import choose_shape, pack, step_shapes
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Drawn, Span
from jaxserve.startup import LoadedEngine, load_engine, resolve_dtype
from jaxserve.swap import Move
from jaxserve.terminal import ProgressBar

PACK_EVERY = 16
"""One step in this many is packed twice, the second time to see how long that takes."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of every step of a run.

    Attributes:
        step: from one step's results to the next one's, as the engine counts it.
        launch: of the executor's launch: pack, transfer, dispatch.
        pack: of packing alone, now and then.
        books: of the rest of the host's work: schedule, commit.
    """

    step: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    pack: list[float] = field(default_factory=list)
    books: list[float] = field(default_factory=list)

    def figures(self) -> Point:
        """Medians. host_ms is schedule, pack and commit together."""
        return {
            "step_ms": milliseconds(self.step),
            "launch_ms": milliseconds(self.launch),
            "host_ms": rounded(milliseconds(self.pack) + milliseconds(self.books)),
        }


def milliseconds(seconds: Sequence[float]) -> float:
    return rounded(statistics.median(seconds) * 1e3)


class TimedExecutor:
    """An executor that knows how long its last two calls took.

    Attributes:
        launching: seconds of the last launch: pack, transfer, dispatch. On a CPU jax may run a
            step right there.
        waiting: seconds of the last collect, most of it waiting for the device.
    """

    def __init__(self, executor: Executor, shapes: Sequence[StepShape], times: StepTimes) -> None:
        self._executor = executor
        self._shapes = shapes
        self._times = times
        self.launching = 0.0
        self._preparing = 0.0
        self.waiting = 0.0

    def move(self, moves: tuple[Move, ...]) -> None:
        self._executor.move(moves)

    def prepare(self, spans: tuple[Span, ...]) -> Prepared:
        started = time.perf_counter()
        prepared = self._executor.prepare(spans)
        self._preparing = time.perf_counter() - started
        return prepared

    def launch(self, prepared: Prepared) -> Launched:
        started = time.perf_counter() - self._preparing
        launched = self._executor.launch(prepared)
        self._times.launch.append(time.perf_counter() - started)
        spans = prepared.spans
        if len(self._times.launch) % PACK_EVERY == 1:
            packed = time.perf_counter()
            pack(spans, choose_shape(self._shapes, spans))
            self._times.pack.append(time.perf_counter() - packed)
        self.launching = time.perf_counter() - started
        return launched

    def is_done(self, launched: Launched) -> bool:
        return self._executor.is_done(launched)

    def collect(self, launched: Launched) -> list[Drawn]:
        started = time.perf_counter()
        drawn = self._executor.collect(launched)
        self.waiting = time.perf_counter() - started
        return drawn


def shapes_of(scheduler: Scheduler) -> tuple[StepShape, ...]:
    """The ladder of shapes its steps are compiled for."""
    return step_shapes(
        max_rows=scheduler.max_rows,
        token_budget=scheduler.token_budget,
        max_context=scheduler.max_context,
        page_size=scheduler.pool.page_size,
    )


def run_round(
    loaded: LoadedEngine, prompts: Sequence[Sequence[int]], num_tokens: int, times: StepTimes
) -> Round:
    """Serve the prompts together, `num_tokens` greedy tokens each, and note when tokens come."""
    timed = TimedExecutor(loaded.engine.executor, shapes_of(loaded.engine.scheduler), times)
    engine = Engine(loaded.engine.scheduler, timed)
    sampling = SamplingParams(max_tokens=num_tokens)
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), tuple(prompt), sampling))
    arrivals: dict[str, list[float]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_work:
        called = time.perf_counter()
        timed.waiting = timed.launching = 0.0
        events = engine.step()
        now = time.perf_counter()
        if timed.waiting:  # all but the first call, which only launches
            times.step.append(engine.counters.step_seconds)
            times.books.append(now - called - timed.waiting - timed.launching)
        for event in events:
            if event.token_id is None:
                raise BenchError(f"a request failed: {event.message}")
            arrivals[event.request_id].append(now)
    timelines = tuple(Timeline(started, at[0], at[-1], len(at)) for at in arrivals.values())
    return Round(max(each.last for each in timelines) - started, timelines)


def measure(loaded: LoadedEngine, flags: argparse.Namespace, concurrency: int) -> Point:
    """One point: a round to warm up, then the measured ones."""
    prompts = random_prompts(concurrency, flags.prompt_tokens, loaded.vocab_size, flags.seed)
    run_round(loaded, next(prompts), min(WARM_UP_TOKENS, flags.output_tokens), StepTimes())
    times = StepTimes()
    rounds = [
        run_round(loaded, each, flags.output_tokens, times)
        for each in itertools.islice(prompts, flags.repeats)
    ]
    return {
        **facts("offline", flags, concurrency),
        "device": jax.devices()[0].device_kind,
        "dtype": resolve_dtype(flags.dtype, jax.default_backend()).name,
        "engine": loaded.description,
        **figures(rounds),
        **times.figures(),
    }


def run(flags: argparse.Namespace) -> None:
    """Measure, write and show."""
    settings: dict[str, Any] = engine_flags(flags)
    config = EngineConfig(flags.model, flags.store, step=flags.step, **settings)
    console = Console(stderr=True)
    points = []
    with ProgressBar(console) as progress:
        loaded = load_engine(config, progress=progress.update)
    for concurrency in flags.concurrency:
        points.append(measure(loaded, flags, concurrency))
        write_point(points[-1], sys.stdout, flags.json)
    print_table(points, console)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Lines of JSON go to stdout, everything for people to stderr."""
    parser = argparse.ArgumentParser(prog="python -m bench.offline", description=__doc__)
    add_flags(parser)
    parser.add_argument("--step", metavar="MODULE:FACTORY", help="a step function of your own")
    flags = parser.parse_args(argv)
    return exit_code(partial(run, flags))


if __name__ == "__main__":
    sys.exit(main())
