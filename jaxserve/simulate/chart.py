"""Goodput against offered load, for each way to schedule."""

from __future__ import annotations

from pathlib import Path

from jaxserve.line_chart import draw_curves, write_svg
from jaxserve.simulate.compare import Comparison


def write_chart(comparison: Comparison, file: Path) -> None:
    """Write a chart. Raises ConfigError for a name that is not .svg or cannot be written."""
    curves = {
        name: [(each.offered, each.goodput) for each in measured]
        for name, measured in comparison.measured.items()
    }
    title = f"{comparison.mix}: requests/s answered within the promise"
    write_svg(draw_curves(title, "requests/s offered", curves, ideal=True), file)
