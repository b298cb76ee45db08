"""`jaxserve bench serve` and `sweep`: run a load, print a table, write JSON and a picture."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve.bench.drive import drive
from jaxserve.bench.figures import PERCENTILES, Answer, summarise
from jaxserve.bench.load import Ask, make_load, read_trace
from jaxserve.client.asynchronous import AsyncClient
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.line_chart import draw_curves, write_svg
from jaxserve.terminal import ProgressBar

Point = dict[str, Any]
SHOWN = ("mean", *(f"p{percent}" for percent in PERCENTILES))
FACTS = ("url", "endpoint", "prompt_tokens", "output_tokens", "seed", "max_concurrency")


def run_serve(flags: argparse.Namespace) -> int:
    """One load. 1 if any request failed."""
    if flags.trace is not None:
        asks = read_trace(flags.trace, flags.seed)
    else:
        asks = load_of(flags, flags.request_rate)
    point = asyncio.run(measure_load(flags, asks, flags.request_rate))
    print_points([point])
    write_json(flags.json, [point])
    return int(point["failed"] > 0)


def run_sweep(flags: argparse.Namespace) -> int:
    """A load at each rate. 1 if any request failed."""
    flags.max_concurrency = None
    points = [
        asyncio.run(measure_load(flags, load_of(flags, rate), rate)) for rate in flags.request_rates
    ]
    print_points(points)
    write_json(flags.json, points)
    if flags.plot is not None:
        curves = {"answered": [(p["request_rate"], p["requests_per_s"]) for p in points]}
        if flags.goodput:
            curves["good"] = [(p["request_rate"], p["goodput_per_s"]) for p in points]
        title = f"{points[0]['model']}: requests/s answered"
        write_svg(draw_curves(title, "requests/s offered", curves, ideal=True), flags.plot)
    return int(any(point["failed"] for point in points))


def lengths(flags: argparse.Namespace) -> dict[str, int]:
    """What every benchmark can be told of its prompts and answers."""
    return {name: getattr(flags, name) for name in ("prompt_tokens", "output_tokens", "seed")}


def load_of(flags: argparse.Namespace, rate: float | None) -> list[Ask]:
    return make_load(flags.requests, rate=rate, prompts=flags.prompts, **lengths(flags))


async def measure_load(flags: argparse.Namespace, asks: Sequence[Ask], rate: float | None) -> Point:
    """The figures of one load, and what it was.

    Raises:
        JaxserveError: the server cannot be reached, or not one request was answered.
    """
    key = flags.api_key or os.environ.get("JAXSERVE_API_KEY")
    async with AsyncClient(flags.url, api_key=key, model=flags.model, retries=0) as asking:
        model = flags.model or await asking.first_model()
    async with AsyncClient(flags.url, api_key=key, model=model, retries=0) as client:
        with ProgressBar() as bar:
            answers, seconds = await drive(
                client,
                asks,
                chat=flags.endpoint == "chat",
                max_concurrency=flags.max_concurrency,
                ignore_eos=flags.ignore_eos,
                on_answer=lambda done: bar.update("requests", done, len(asks)),
            )
    report_failures(answers)
    facts = {name: getattr(flags, name) for name in FACTS}
    return {
        "model": model,
        "request_rate": rate,
        **facts,
        "goodput": flags.goodput,
        **summarise(answers, seconds, flags.goodput),
    }


def report_failures(answers: Sequence[Answer]) -> None:
    """Say why requests failed. JaxserveError if all did: there are no figures of that."""
    errors = [answer.error for answer in answers if answer.error is not None]
    if not errors:
        return
    line = f"{len(errors)} of {len(answers)} requests failed, the first with: {errors[0]}"
    if len(errors) == len(answers):
        raise JaxserveError(line)
    print(line, file=sys.stderr)


def print_points(points: Sequence[Point]) -> None:
    """A table: a line for each latency, and above it what was done, for each load."""
    console = Console()
    for point in points:
        rate = point["request_rate"]
        offered = "all at once" if rate is None else f"{rate:g} requests/s offered"
        good = f", {point['goodput_per_s']:g} of them good" if "goodput_per_s" in point else ""
        console.print(
            f"{point['model']}, {offered}: {point['requests_per_s']:g} requests/s answered{good}; "
            f"{point['output_tokens_per_s']:g} output tokens/s; {point['requests']} requests, "
            f"{point['failed']} failed",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        table = Table("ms", *SHOWN, box=None)
        for name in ("ttft", "tpot", "itl", "e2e"):
            table.add_row(name.upper(), *(f"{point[f'{name}_{of}_ms']:,g}" for of in SHOWN))
        console.print(table)


def write_json(file: Path | None, points: Sequence[Point]) -> None:
    """The figures, one line of JSON each. ConfigError if they cannot be written."""
    if file is None:
        return
    try:
        file.write_text("".join(json.dumps(point) + "\n" for point in points))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
