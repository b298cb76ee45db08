"""Step time against rows, as an SVG that reads on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from bench.measure import BenchError, Point

WIDTH, HEIGHT = 800, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 776, 40, 400  # of the area between the axes
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#bf8700", "#8250df", "#8c959f")
STYLE = """
svg { font: 13px system-ui, sans-serif; --ink: #1f2328; --faint: #d0d7de; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --faint: #30363d; } }
text { fill: var(--ink); } .title { font-size: 16px; font-weight: 600; }
.grid { stroke: var(--faint); } .curve { fill: none; stroke-width: 2.5; }
"""


def write_chart(points: Sequence[Point], file: Path) -> None:
    """Write a chart. Raises BenchError for a name that is not .svg or cannot be written."""
    if file.suffix.lower() != ".svg":
        raise BenchError(f"--plot draws SVG: {file.name!r} must end in .svg")
    try:
        file.write_text(draw_chart(points))
    except OSError as error:
        raise BenchError(f"cannot write {file}: {error.strerror}; choose another place") from error


def draw_chart(points: Sequence[Point]) -> str:
    """The SVG document: a curve for each step at each number of tokens and keys."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        name = f"{point['step']}, {point['tokens']} of {point['context']} tokens"
        curves.setdefault(name, []).append((_number(point["rows"]), _number(point["step_ms"])))
    most_rows = max(rows for curve in curves.values() for rows, _ in curve)
    most_ms = max(ms for curve in curves.values() for _, ms in curve)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<style>{STYLE}</style>",
        _text(LEFT, 24, "milliseconds a step", "title"),
        *_axes(most_rows, most_ms),
    ]
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [(_x(rows, most_rows), _y(ms, most_ms)) for rows, ms in sorted(curve)]
        line = " ".join(f"{x},{y}" for x, y in places)
        lines.append(f'<polyline class="curve" stroke="{colour}" points="{line}"/>')
        lines += [f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>' for x, y in places]
        y = TOP + 20 + 20 * index
        lines.append(f'<path class="curve" stroke="{colour}" d="M{LEFT + 16} {y} h20"/>')
        lines.append(_text(LEFT + 42, y + 4, name))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _axes(most_rows: float, most_ms: float) -> Iterator[str]:
    for value in _ticks(most_ms):
        y = _y(value, most_ms)
        yield f'<path class="grid" d="M{LEFT} {y} H{RIGHT}"/>'
        yield _text(LEFT - 8, y + 4, f"{value:g}", anchor="end")
    for value in _ticks(most_rows):
        x = _x(value, most_rows)
        yield f'<path class="grid" d="M{x} {BOTTOM} v5"/>'
        yield _text(x, BOTTOM + 20, f"{value:g}", anchor="middle")
    yield _text(RIGHT, BOTTOM + 42, "rows", anchor="end")


def _ticks(most: float) -> list[float]:
    """From 0 to at most `most`, at most nine."""
    step = 10 ** math.floor(math.log10(most / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if most / (step * factor) <= 8)
    return [index * step for index in range(int(most / step) + 1)]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def _x(rows: float, most: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * rows / most, 1)


def _y(ms: float, most: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * ms / most, 1)


def _text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{name}>{escape(text)}</text>'
