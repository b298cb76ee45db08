"""One step by itself: how long it takes at so many rows, tokens and keys, for the default step and
for others beside it.

python -m bench.step MODEL --rows 1 8 64 --context 200 --plot step.svg
python -m bench.step MODEL --rows 1 --tokens 128 512 --context 512
python -m bench.step MODEL --rows 1 8 --step examples.contrastive_step:make_step
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from bench.measure import (
    BenchError,
    Point,
    add_engine_flags,
    at_least,
    engine_flags,
    machine_facts,
    rounded,
    write_point,
)
from bench.program import exit_code
from checkpoints import Store, open_checkpoint
from jaxserve.aot.target import settle_for_cpu
from jaxserve.batch import NULL_PAGE, StepShape
from jaxserve.config import EngineConfig
from jaxserve.executor import JaxExecutor, compile_steps, empty_state
from jaxserve.flags.engine import ENGINE
from jaxserve.flags.settings import add_settings
from jaxserve.huge_pages import settle_on_huge_pages
from jaxserve.line_chart import draw_curves, write_svg
from jaxserve.models.attention import cache_dtype, choose_attention, wanted_attention
from jaxserve.models.decoder import Decoder
from jaxserve.models.packed import pack_params
from jaxserve.request import Request, SamplingParams
from jaxserve.sequence import Sequence as Running
from jaxserve.sequence import Span
from jaxserve.startup import packs_weights, resolve_dtype, resolve_step, use_compilation_cache
from jaxserve.step import make_step

PAGE_SIZE = 16
DEFAULT_STEP = "default"
WARM_UPS = 3


def spans_of(rows: int, tokens: int, context: int) -> tuple[Span, ...]:
    """The last `tokens` of `context` in each row, greedy; every row has pages of its own."""
    pages = -(-context // PAGE_SIZE)

    def span(row: int) -> Span:
        token_ids = [(row + i) % 251 for i in range(context)]
        first = NULL_PAGE + 1 + row * pages
        sequence = Running(
            Request(str(row), tuple(token_ids), SamplingParams(max_tokens=1)),
            tokens=array("i", token_ids),
            pages=array("i", range(first, first + pages)),
            slot=row,
        )
        return Span(sequence, context - tokens, context, feed=False, draws=True)

    return tuple(span(row) for row in range(rows))


def time_step(executor: JaxExecutor, spans: tuple[Span, ...], repeats: int) -> list[float]:
    """Seconds of each run, from the launch until its tokens are there."""
    seconds = []
    for _ in range(WARM_UPS + repeats):
        started = time.perf_counter()
        executor.collect(executor.launch(executor.prepare(spans)))
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UPS:]


def measure(flags: argparse.Namespace) -> Iterator[Point]:
    """A point for every step and every size that makes sense, the default step first."""
    sizes = [
        (rows, tokens, context)
        for rows, tokens, context in product(flags.rows, flags.tokens, flags.context)
        if tokens <= context
    ]
    if not sizes:
        raise BenchError("no --tokens fit into a --context: it counts them too")
    settle_for_cpu()
    store = Store(flags.store)
    use_compilation_cache(store.xla_cache)
    checkpoint = open_checkpoint(flags.model, store)
    model = checkpoint.config
    dtype = resolve_dtype(flags.dtype, jax.default_backend())
    kv_dtype = cache_dtype(flags.kv, dtype)
    attention = choose_attention("auto", wanted_attention(model, PAGE_SIZE, dtype, kv_dtype))
    decoder = Decoder(model, attention)
    steps = {DEFAULT_STEP: make_step(decoder)}
    steps |= {name: resolve_step(name, decoder) for name in flags.step}
    params = checkpoint.load(dtype=dtype)
    if packs_weights(flags.weights, attention, dtype):
        params = pack_params(params, tied_head=model.tied_head, int8=flags.weights == "int8")

    most_rows, most_context = max(flags.rows), max(flags.context)
    pages = -(-most_context // PAGE_SIZE)
    for name, step in steps.items():
        for rows, tokens, context in sizes:
            # A state of its own: the executor consumes it.
            state = empty_state(
                model,
                num_pages=1 + most_rows * pages,
                page_size=PAGE_SIZE,
                max_rows=most_rows,
                dtype=kv_dtype,
            )
            settle_on_huge_pages(jax.tree.leaves((params, state)))
            shape = StepShape(rows * tokens, rows, pages, PAGE_SIZE)
            executor = JaxExecutor(params, state, compile_steps(step, params, state, [shape]))
            seconds = time_step(executor, spans_of(rows, tokens, context), flags.repeats)
            middle = statistics.median(seconds)
            yield {
                "bench": "step",
                "model": str(flags.model),
                "step": name,
                "rows": rows,
                "tokens": tokens,
                "context": context,
                "step_ms": rounded(middle * 1e3),
                "step_ms_range": [rounded(min(seconds) * 1e3), rounded(max(seconds) * 1e3)],
                "tokens_per_s": rounded(rows * tokens / middle),
                "repeats": flags.repeats,
                **engine_flags(flags),
                "dtype": dtype.name,
                "weights": flags.weights,
                "kv": flags.kv,
                "device": jax.devices()[0].device_kind,
                **machine_facts(),
            }


def print_points(points: Sequence[Point], console: Console) -> None:
    """Milliseconds: a line for each size, a column for each step."""
    steps = list(dict.fromkeys(str(point["step"]) for point in points))
    table = Table("rows", "tokens", "context", *(f"{step}, ms" for step in steps), box=None)
    found = {(p["rows"], p["tokens"], p["context"], p["step"]): p["step_ms"] for p in points}
    for size in dict.fromkeys(key[:3] for key in found):
        table.add_row(*map(str, size), *(f"{found.get((*size, step), '')}" for step in steps))
    console.print(table)


def draw_points(points: Sequence[Point]) -> str:
    """Milliseconds by rows, as an SVG: a curve for each step at each number of tokens and keys."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        rows, milliseconds = point["rows"], point["step_ms"]
        assert isinstance(rows, int) and isinstance(milliseconds, float)
        name = f"{point['step']}, {point['tokens']} of {point['context']} tokens"
        curves.setdefault(name, []).append((rows, milliseconds))
    in_order = {name: sorted(curve) for name, curve in curves.items()}
    return draw_curves("milliseconds a step", "rows", in_order)


def run(flags: argparse.Namespace) -> None:
    """Measure, write and show."""
    points = []
    for point in measure(flags):
        points.append(point)
        write_point(point, sys.stdout, flags.json)
    if flags.plot is not None:
        write_svg(draw_points(points), flags.plot)
    print_points(points, Console(stderr=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Lines of JSON go to stdout, everything for people to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_flags(parser)
    kept = [each for each in ENGINE if each.dest in ("kv", "weights")]
    add_settings(parser, EngineConfig, kept)
    for flag, default, what in (
        ("--rows", [1, 8, 64], "sequences in a step"),
        ("--tokens", [1], "of each row that it computes"),
        ("--context", [200], "of each row, those included"),
    ):
        parser.add_argument(
            flag, type=at_least(1), nargs="+", default=default, metavar="N", help=what
        )
    parser.add_argument(
        "--step", nargs="+", default=[], metavar="MODULE:FACTORY", help="beside the default one"
    )
    parser.add_argument("--repeats", type=at_least(1), default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to FILE too")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw step time by rows")
    flags = parser.parse_args(argv)
    return exit_code(partial(run, flags))


if __name__ == "__main__":
    sys.exit(main())
