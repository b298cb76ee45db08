"""A stage of the check: points made in a process of its own, within a time of its own.

A process can be stopped in the middle of a compilation, and takes its device memory and a GPU's
error, which nothing else clears, with it. No jax here.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from bench.measure import Point

PROCESSES = multiprocessing.get_context("forkserver")
"""Where jax is imported once, and touches no device, for all stages."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the card was measured to do: bandwidth, bytes/s; flops, FLOP/s of bf16 products."""

    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Given:
    """What a stage has to go by.

    Attributes:
        cache: folder for compiled steps: what one stage compiles another finds.
        rates: None if they could not be measured.
        mosaic: the kernels for Hopper ran here and agreed with the reference.
    """

    cache: Path
    rates: Rates | None = None
    mosaic: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of the check.

    Attributes:
        name: for people.
        entry: `module:function` of what is given a `Given` and yields the points.
        budget: seconds, from the start of its process.
    """

    name: str
    entry: str
    budget: float


@dataclass(slots=True)
class Outcome:
    """What became of a stage. The points are those that came before the end, whatever it was."""

    stage: str
    ended: Literal["done", "cut", "failed"] = "done"
    seconds: float = 0.0
    error: str = ""
    points: list[Point] = field(default_factory=list)


def run_stage(stage: Stage, given: Given) -> Outcome:
    """Run it to its end, or to that of its budget."""
    outcome = Outcome(stage.name)
    started = time.monotonic()
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_work, args=(stage.entry, given, sender))
    process.start()
    sender.close()
    try:
        while receiver.poll(max(0.0, started + stage.budget - time.monotonic())):
            told = receiver.recv()
            if isinstance(told, str):
                outcome.error = told
            else:
                outcome.points.append(told)
        outcome.ended, outcome.error = "cut", f"its {stage.budget:g} s were over"
    except EOFError:
        process.join()
        if process.exitcode:
            outcome.error = outcome.error or f"its process ended with {process.exitcode}"
            outcome.ended = "failed"
    finally:
        process.kill()
        process.join()
        receiver.close()
    outcome.seconds = round(time.monotonic() - started, 2)
    return outcome


def _work(entry: str, given: Given, sender: Connection) -> None:
    """The process: every point as soon as there is one, or what went wrong."""
    try:
        module, _, function = entry.partition(":")
        for point in getattr(importlib.import_module(module), function)(given):
            sender.send(point)
    except Exception as error:
        traceback.print_exc()
        sender.send(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error
