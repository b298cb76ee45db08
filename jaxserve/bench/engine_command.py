"""`jaxserve bench latency` and `throughput`: an engine in this process, measured."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from jaxserve.bench.command import lengths, write_json
from jaxserve.bench.engine import measure_latency, measure_throughput
from jaxserve.bench.figures import Figures
from jaxserve.offline.command import engine_options
from jaxserve.offline.llm import LLM


def run_latency(flags: argparse.Namespace) -> int:
    """The latency of a batch."""
    with LLM(flags.model, store=flags.store, **engine_options(flags)) as llm:
        sizes = {name: getattr(flags, name) for name in ("batch_size", "repeats")}
        figures = measure_latency(llm, **sizes, **lengths(flags))
        report_engine(flags, llm, figures)
    return 0


def run_throughput(flags: argparse.Namespace) -> int:
    """The throughput of many prompts."""
    with LLM(flags.model, store=flags.store, **engine_options(flags)) as llm:
        figures = measure_throughput(llm, requests=flags.requests, **lengths(flags))
        report_engine(flags, llm, figures)
    return 0


def report_engine(flags: argparse.Namespace, llm: LLM, figures: Figures) -> None:
    """Print what was measured in this process, and write it."""
    point = {"model": flags.model, "engine": llm.description, **lengths(flags), **figures}
    Console(stderr=True).print(llm.description, markup=False, highlight=False)
    table = Table("figure", "value", box=None)
    for name, value in figures.items():
        table.add_row(name, f"{value:,g}")
    Console().print(table)
    write_json(flags.json, [point])
