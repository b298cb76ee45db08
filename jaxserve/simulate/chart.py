"""Goodput against offered load, for each way to schedule."""

from __future__ import annotations

from pathlib import Path

from jaxserve.line_chart import write_curves
from jaxserve.simulate.compare import Comparison


def write_chart(comparison: Comparison, file: Path) -> None:
    """Write a chart. Raises ConfigError for a name that is not .svg or cannot be written."""
    curves = {
        name: [(each.offered, each.goodput) for each in measured]
        for name, measured in comparison.measured.items()
    }
    title = f"{comparison.mix}: requests/s answered within the promise"
    write_curves(title, curves, file)
