"""Curves over an axis, as an SVG for light and for dark; and the frame, for charts with more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from jaxserve.errors import ConfigError

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""By name: places (x, y), in order."""

WIDTH, HEIGHT = 800, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 776, 64, 400  # of the area between the axes
COLOURS = ("#8c959f", "#cf222e", "#bf8700", "#0969da", "#8250df", "#1a7f37")
STYLE = """
svg { font: 13px system-ui, sans-serif; --ink: #1f2328; --faint: #d0d7de; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --faint: #30363d; } }
text { fill: var(--ink); } .title { font-size: 16px; font-weight: 600; }
.grid { stroke: var(--faint); } .ideal { stroke: var(--ink); stroke-dasharray: 5 4; fill: none; }
.curve { fill: none; stroke-width: 2.5; }
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places in the picture."""

    max_x: float
    max_y: float

    def x(self, value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * value / self.max_x, 1)

    def y(self, value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * value / self.max_y, 1)

    def line(self, points: Iterable[tuple[float, float]]) -> str:
        """As a polyline's `points`."""
        return " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points)


def write_svg(svg: str, file: Path) -> None:
    """Write a chart. Raises ConfigError for a name that is not .svg or cannot be written."""
    if file.suffix.lower() != ".svg":
        raise ConfigError(f"--plot draws SVG: {file.name!r} must end in .svg")
    try:
        file.write_text(svg)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; choose another place") from error


def draw_curves(title: str, x_label: str, curves: Curves, *, ideal: bool = False) -> str:
    """The SVG document. `ideal`: a dashed line where y is x, and the same scale for both."""
    max_x = max(x for points in curves.values() for x, _ in points)
    max_y = max_x if ideal else max(y for points in curves.values() for _, y in points)
    scale = Scale(max_x, max_y)
    lines = list(axes(scale, x_label))
    if ideal:
        start, end = f"{LEFT} {BOTTOM}", f"{scale.x(max_x)} {scale.y(max_x)}"
        lines.append(f'<path class="ideal" d="M{start} L{end}"/>')
    for index, (name, points) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        place = TOP + 20 + 20 * index
        lines += [
            f'<polyline id={quoteattr(name)} class="curve" stroke="{colour}" '
            f'points="{scale.line(points)}"/>',
            *(
                f'<circle cx="{scale.x(x)}" cy="{scale.y(y)}" r="4" fill="{colour}"/>'
                for x, y in points
            ),
            f'<path class="curve" stroke="{colour}" d="M{LEFT + 16} {place} h20"/>',
            text(LEFT + 42, place + 4, name),
        ]
    return document(title, STYLE, lines)


def document(title: str, style: str, lines: Iterable[str]) -> str:
    """A whole SVG."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<style>{style}</style>",
        text(LEFT, 24, title, "title"),
    )
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


def axes(scale: Scale, x_label: str) -> Iterator[str]:
    """Lines across and marks below, with their numbers."""
    for value in ticks(scale.max_y):
        y = scale.y(value)
        yield f'<path class="grid" d="M{LEFT} {y} H{RIGHT}"/>'
        yield text(LEFT - 8, y + 4, f"{value:,g}", anchor="end")
    for value in ticks(scale.max_x):
        x = scale.x(value)
        yield f'<path class="grid" d="M{x} {BOTTOM} v5"/>'
        yield text(x, BOTTOM + 20, f"{value:,g}", anchor="middle")
    yield text(RIGHT, BOTTOM + 42, x_label, anchor="end")


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to at most `top`, at most nine."""
    step = 10 ** math.floor(math.log10(top / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if top / (step * factor) <= 8)
    return [index * step for index in range(int(top / step) + 1)]


def text(x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> str:
    """A text element."""
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{name}>{escape(words)}</text>'
