"""What benchmarks share: the work, how a figure is made of it, and how it is written down."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from checkpoints import DEFAULT_MODEL, default_store_path
from jaxserve.bench.figures import percentile as percentile
from jaxserve.bench.figures import rounded as rounded
from jaxserve.config import EngineConfig
from jaxserve.flags.engine import ENGINE
from jaxserve.flags.settings import add_settings

Value = str | int | float | list[float]
Point = dict[str, Value]
"""One line of JSON: what was measured, on what, and the figures."""

WARM_UP_TOKENS = 8
"""Output tokens of the round before the measured ones."""
COLUMNS = (
    ("C", "concurrency"),
    ("out tok/s", "output_tokens_per_s"),
    ("dec tok/s", "decode_tokens_per_s"),
    ("TTFT p50", "ttft_p50_ms"),
    ("p95", "ttft_p95_ms"),
    ("TPOT p50", "tpot_p50_ms"),
    ("p95", "tpot_p95_ms"),
    ("step", "step_ms"),
    ("host", "host_ms"),
)


class BenchError(Exception):
    """The figures would mean nothing, and why."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request, in seconds of one clock.

    Attributes:
        sent: when it was asked for. first, last: when its first and last token came.
        num_tokens: generated, 2 or more.
    """

    sent: float
    first: float
    last: float
    num_tokens: int

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that were all sent at once. `seconds`: from then to the last token of all."""

    seconds: float
    requests: tuple[Timeline, ...]


def figures(rounds: Sequence[Round]) -> Point:
    """Rates are medians over the rounds; latencies are percentiles over all their requests.

    Raises BenchError if all tokens of a round came at one moment: there is no rate to speak of.
    """
    ttft = [request.ttft * 1e3 for each in rounds for request in each.requests]
    tpot = [request.tpot * 1e3 for each in rounds for request in each.requests]
    output = [sum(r.num_tokens for r in each.requests) / each.seconds for each in rounds]
    if not all(any(request.tpot for request in each.requests) for each in rounds):
        raise BenchError("all tokens came at once: ask for more --output-tokens")
    decode = [
        len(each.requests) / statistics.fmean(request.tpot for request in each.requests)
        for each in rounds
    ]
    return {
        "output_tokens_per_s": rounded(statistics.median(output)),
        "output_tokens_per_s_range": [rounded(min(output)), rounded(max(output))],
        "decode_tokens_per_s": rounded(statistics.median(decode)),
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p95_ms": percentile(ttft, 95),
        "tpot_p50_ms": percentile(tpot, 50),
        "tpot_p95_ms": percentile(tpot, 95),
    }


def random_prompts(
    concurrency: int, num_tokens: int, vocab_size: int, seed: int
) -> Iterator[list[list[int]]]:
    """Rounds of `concurrency` prompts, without end. No two are alike: nothing can be reused."""
    rng = random.Random(seed)
    while True:
        yield [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(concurrency)]


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The model and the engine. The flags are those of `jaxserve serve`."""
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path")
    parser.add_argument("--store", type=Path, default=default_store_path())
    names = ("dtype", "max_rows", "token_budget", "max_context")
    add_settings(parser, EngineConfig, [each for each in ENGINE if each.dest in names])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The work to do, and the engine to do it with."""
    add_engine_flags(parser)
    work = parser.add_argument_group("work")
    work.add_argument("--prompt-tokens", type=at_least(1), default=128, metavar="N")
    work.add_argument("--output-tokens", type=at_least(2), default=128, metavar="N")
    work.add_argument(
        "--concurrency",
        type=at_least(1),
        nargs="+",
        default=[1, 8, 32, 64],
        metavar="C",
        help="requests sent at once; one point for each",
    )
    work.add_argument("--repeats", type=at_least(1), default=3, help="measured rounds per point")
    work.add_argument("--seed", type=int, default=0, help="of the prompts")
    work.add_argument("--json", type=Path, metavar="FILE", help="append the lines to FILE too")


def engine_flags(flags: argparse.Namespace) -> dict[str, Value]:
    """The engine settings that were given, by name."""
    names = ("dtype", "max_rows", "token_budget", "max_context", "ttft_ms", "tpot_ms", "percentile")
    return {name: value for name in names if (value := getattr(flags, name, None)) is not None}


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `low`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low}")
        return int(text)

    return read


def facts(bench: str, flags: argparse.Namespace, concurrency: int) -> Point:
    """What a figure needs to be worth anything, the device and dtype apart."""
    return {
        "bench": bench,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": str(flags.model),
        "concurrency": concurrency,
        "prompt_tokens": flags.prompt_tokens,
        "output_tokens": flags.output_tokens,
        "repeats": flags.repeats,
        **engine_flags(flags),
        **machine_facts(),
    }


def machine_facts() -> Point:
    """The machine, how busy it is, and the code."""
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "load_average": rounded(os.getloadavg()[0]),
        "commit": commit(),
        "jax": version("jax"),
    }


def cpu_name() -> str:
    described = Path("/proc/cpuinfo")
    for line in described.read_text().splitlines() if described.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"


def cores() -> int:
    """Cores this process may use: fewer than there are under taskset or in a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def commit() -> str:
    """Of the checkout this file is in, with a mark if it has changes; "unknown" outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def write_point(point: Point, out: TextIO, file: Path | None) -> None:
    """One line of JSON to `out`, and to the end of `file` if there is one."""
    line = json.dumps(point)
    print(line, file=out, flush=True)
    if file is not None:
        with file.open("a") as lines:
            lines.write(line + "\n")


def print_table(points: Sequence[Point], console: Console) -> None:
    """The points for a person, times in milliseconds: the columns that any of them has."""
    columns = [(head, key) for head, key in COLUMNS if any(key in point for point in points)]
    table = Table(*(head for head, _ in columns), box=None)
    for point in points:
        table.add_row(*(f"{point.get(key, '')}" for _, key in columns))
    console.print(table)
