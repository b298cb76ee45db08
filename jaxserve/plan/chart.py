"""Step time and TPOT against batch size, as an SVG that reads on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from jaxserve.errors import ConfigError
from jaxserve.plan.result import Plan

WIDTH, HEIGHT = 800, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 776, 84, 400  # of the area between the axes

STYLE = """
svg { font: 13px system-ui, sans-serif; --ink: #1f2328; --faint: #d0d7de;
  --without: #8250df; --decode: #0969da; --tpot: #1a7f37; --limit: #cf222e; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --faint: #30363d;
  --without: #bc8cff; --decode: #58a6ff; --tpot: #3fb950; --limit: #ff7b72; } }
text { fill: var(--ink); } .title { font-size: 16px; font-weight: 600; }
.grid { stroke: var(--faint); } .axis { stroke: var(--ink); }
.curve { fill: none; stroke-width: 2.5; } .without { stroke: var(--without); }
.decode { stroke: var(--decode); } .tpot { stroke: var(--tpot); }
.limit { stroke: var(--limit); stroke-dasharray: 5 4; } .limit-text { fill: var(--limit); }
"""

CURVES = (
    ("without", "decode step, weights only", "without_kv_seconds"),
    ("decode", "decode step, KV reads included", "decode_seconds"),
    ("tpot", "TPOT, prompts prefilled alongside", "tpot_seconds"),
)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Rows and milliseconds to a place in the picture."""

    max_rows: float
    max_ms: float

    def x(self, rows: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * rows / self.max_rows, 1)

    def y(self, ms: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * ms / self.max_ms, 1)


def write_chart(plan: Plan, file: Path) -> None:
    """Write a plan's chart. Raises ConfigError for a name that is not .svg or cannot be written."""
    if file.suffix.lower() != ".svg":
        raise ConfigError(f"--plot draws SVG: {file.name!r} must end in .svg")
    try:
        file.write_text(draw_chart(plan))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; choose another place") from error


def draw_chart(plan: Plan) -> str:
    """The SVG document: three curves over the batch size, and the limits as dashed lines."""
    promise_ms = plan.promise.tpot * 1e3
    highest = max(point.decode_seconds for point in plan.batches) * 1e3
    scale = _Scale(plan.batches[-1].rows, 1.15 * max(promise_ms, min(highest, 3 * promise_ms)))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<style>{STYLE}</style>",
        # A curve that leaves the picture at the top must not cross the legend.
        f'<clipPath id="area"><rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" '
        f'height="{BOTTOM - TOP}"/></clipPath>',
        _text(LEFT, 24, f"{plan.model} on {plan.card.name}: step time by batch size", "title"),
        *_axes(scale),
        *_curves(plan, scale),
        *_limits(plan, scale, promise_ms),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _axes(scale: _Scale) -> Iterator[str]:
    for ms in _ticks(scale.max_ms):
        yield _line(LEFT, scale.y(ms), RIGHT, scale.y(ms), "grid")
        yield _text(LEFT - 8, scale.y(ms) + 4, f"{ms:,g}", anchor="end")
    for rows in _ticks(scale.max_rows):
        yield _line(scale.x(rows), BOTTOM, scale.x(rows), BOTTOM + 5, "axis")
        yield _text(scale.x(rows), BOTTOM + 20, f"{rows:,g}", anchor="middle")
    yield _line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis")
    yield _line(LEFT, BOTTOM, LEFT, TOP, "axis")
    yield _text(LEFT - 8, TOP - 6, "ms", anchor="end")
    yield _text(RIGHT, BOTTOM + 42, "sequences decoding", anchor="end")


def _curves(plan: Plan, scale: _Scale) -> Iterator[str]:
    for i, (name, label, field) in enumerate(CURVES):
        places = " ".join(
            f"{scale.x(point.rows)},{scale.y(getattr(point, field) * 1e3)}"
            for point in plan.batches
        )
        yield (
            f'<polyline id="{name}" class="curve {name}" points="{places}" clip-path="url(#area)"/>'
        )
        x = LEFT + 236 * i
        yield _line(x, 46, x + 20, 46, f"curve {name}")
        yield _text(x + 26, 50, label)


def _limits(plan: Plan, scale: _Scale, promise_ms: float) -> Iterator[str]:
    yield _line(LEFT, scale.y(promise_ms), RIGHT, scale.y(promise_ms), "limit")
    place = scale.y(promise_ms) - 5
    yield _text(RIGHT, place, f"TPOT {promise_ms:g} ms", "limit-text", anchor="end")
    marks = (("admission", plan.limits.admission), ("memory", plan.limits.memory))
    for i, (name, rows) in enumerate(marks):
        label = f"{name}: {rows:,}"
        if rows > scale.max_rows:
            label += " (further right)"
        x = scale.x(min(rows, scale.max_rows))
        anchor, offset = ("end", -6) if x > (LEFT + RIGHT) / 2 else ("start", 6)
        yield _line(x, TOP, x, BOTTOM, "limit")
        yield _text(x + offset, TOP + 14 + 18 * i, label, "limit-text", anchor=anchor)


def _ticks(top: float) -> Sequence[float]:
    """About five round numbers from 0 to `top`."""
    rough = top / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [i * step for i in range(int(top / step) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{name}>{escape(text)}</text>'
