"""A comparison for people: Markdown tables, which a terminal shows as well as a README."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.simulate.compare import Comparison
from jaxserve.simulate.measure import Measured

THINK_SECONDS = 20.0
COLUMNS = (
    "load",
    "offered req/s",
    "policy",
    "goodput req/s",
    "refused",
    "cut short",
    "TTFT p95 ms",
    "TPOT p95 ms",
    "running (max)",
    "users",
)


def report(comparison: Comparison) -> str:
    """Everything a comparison says, as Markdown."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: Comparison) -> Iterator[str]:
    promise, capacity = comparison.promise, comparison.capacity.items()
    yield f"### {comparison.mix}"
    yield ""
    yield (
        f"Promise: p{promise.percentile:g} TTFT under {promise.ttft * 1e3:g} ms, "
        f"p{promise.percentile:g} TPOT under {promise.tpot * 1e3:g} ms. Capacity, requests/s: "
        + ", ".join(f"{name} {rate:.2f}" if rate else f"{name} none" for name, rate in capacity)
        + f". Users think for {THINK_SECONDS:g} s between an answer and the next request."
    )
    yield ""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|" + "---|" * len(COLUMNS)
    for index, load in enumerate(comparison.loads):
        for name, measured in comparison.measured.items():
            yield _row(comparison, load, name, measured[index])


def _row(comparison: Comparison, load: float, name: str, measured: Measured) -> str:
    kept = measured.keeps(comparison.promise)
    cells = (
        f"{load:g}x",
        f"{measured.offered:.2f}",
        name,
        f"{measured.goodput:.2f}",
        f"{measured.shed:.1%}",
        f"{measured.cut:.1%}",
        f"{measured.ttft * 1e3:,.0f}",
        f"{measured.tpot * 1e3:.1f}",
        f"{measured.rows:,.0f} ({measured.rows_max})",
        f"{measured.users(THINK_SECONDS):,.0f}" if kept else "(promise broken)",
    )
    return "| " + " | ".join(cells) + " |"
