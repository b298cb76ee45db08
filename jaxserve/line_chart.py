"""Curves of requests answered against requests offered, as an SVG for light and for dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from jaxserve.errors import ConfigError

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""By name: (offered, answered) in requests a second, in order."""

WIDTH, HEIGHT = 800, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 776, 84, 400  # of the area between the axes
COLOURS = ("#8c959f", "#cf222e", "#bf8700", "#0969da", "#8250df", "#1a7f37")
STYLE = """
svg { font: 13px system-ui, sans-serif; --ink: #1f2328; --faint: #d0d7de; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --faint: #30363d; } }
text { fill: var(--ink); } .title { font-size: 16px; font-weight: 600; }
.grid { stroke: var(--faint); } .ideal { stroke: var(--ink); stroke-dasharray: 5 4; fill: none; }
.curve { fill: none; stroke-width: 2.5; }
"""


def write_curves(title: str, curves: Curves, file: Path) -> None:
    """Write a chart. Raises ConfigError for a name that is not .svg or cannot be written."""
    if file.suffix.lower() != ".svg":
        raise ConfigError(f"--plot draws SVG: {file.name!r} must end in .svg")
    try:
        file.write_text(draw_curves(title, curves))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; choose another place") from error


def draw_curves(title: str, curves: Curves) -> str:
    """The SVG document: the curves, and a dashed line where all that is offered is answered."""
    top = max(offered for points in curves.values() for offered, _ in points)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<style>{STYLE}</style>",
        _text(LEFT, 24, title, "title"),
        *_axes(top),
        f'<path class="ideal" d="M{_x(0, top)} {_y(0, top)} L{_x(top, top)} {_y(top, top)}"/>',
    ]
    for index, (name, found) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(f"{_x(offered, top)},{_y(answered, top)}" for offered, answered in found)
        place = LEFT + 170 * index
        lines += [
            f'<polyline id="{escape(name)}" class="curve" stroke="{colour}" points="{points}"/>',
            f'<path class="curve" stroke="{colour}" d="M{place} 46 h20"/>',
            _text(place + 26, 50, name),
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _axes(top: float) -> Iterator[str]:
    step = 10 ** math.floor(math.log10(top / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if top / (step * factor) <= 8)
    for index in range(int(top / step) + 1):
        value = index * step
        yield (
            f'<path class="grid" d="M{LEFT} {_y(value, top)} H{RIGHT} '
            f'M{_x(value, top)} {BOTTOM} v5"/>'
        )
        yield _text(LEFT - 8, _y(value, top) + 4, f"{value:g}", anchor="end")
        yield _text(_x(value, top), BOTTOM + 20, f"{value:g}", anchor="middle")
    yield _text(RIGHT, BOTTOM + 42, "requests/s offered", anchor="end")


def _x(value: float, top: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * value / top, 1)


def _y(value: float, top: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * value / top, 1)


def _text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{name}>{escape(text)}</text>'
