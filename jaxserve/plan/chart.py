"""Step time and TPOT against batch size, as an SVG that reads on light and on dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.line_chart import (
    BOTTOM,
    LEFT,
    RIGHT,
    STYLE,
    TOP,
    Scale,
    axes,
    document,
    text,
    write_svg,
)
from jaxserve.plan.result import Plan

COLOURS = """
svg { --without: #8250df; --decode: #0969da; --tpot: #1a7f37; --limit: #cf222e; }
@media (prefers-color-scheme: dark) {
  svg { --without: #bc8cff; --decode: #58a6ff; --tpot: #3fb950; --limit: #ff7b72; }
}
.axis { stroke: var(--ink); } .without { stroke: var(--without); }
.decode { stroke: var(--decode); } .tpot { stroke: var(--tpot); }
.limit { stroke: var(--limit); stroke-dasharray: 5 4; } .limit-text { fill: var(--limit); }
"""

CURVES = (
    ("without", "decode step, weights only", "without_kv_seconds"),
    ("decode", "decode step, KV reads included", "decode_seconds"),
    ("tpot", "TPOT, prompts prefilled alongside", "tpot_seconds"),
)


def write_chart(plan: Plan, file: Path) -> None:
    """Write a plan's chart. Raises ConfigError for a name that is not .svg or cannot be written."""
    write_svg(draw_chart(plan), file)


def draw_chart(plan: Plan) -> str:
    """The SVG document: three curves over the batch size, and the limits as dashed lines."""
    promise_ms = plan.promise.tpot * 1e3
    highest = max(point.decode_seconds for point in plan.batches) * 1e3
    scale = Scale(plan.batches[-1].rows, 1.15 * max(promise_ms, min(highest, 3 * promise_ms)))
    lines = [
        # A curve that leaves the picture at the top must not cross the legend.
        f'<clipPath id="area"><rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" '
        f'height="{BOTTOM - TOP}"/></clipPath>',
        *axes(scale, "sequences decoding"),
        _line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis"),
        _line(LEFT, BOTTOM, LEFT, TOP, "axis"),
        text(LEFT - 8, TOP - 6, "ms", anchor="end"),
        *_curves(plan, scale),
        *_limits(plan, scale, promise_ms),
    ]
    title = f"{plan.model} on {plan.card.name}: step time by batch size"
    return document(title, STYLE + COLOURS, lines)


def _curves(plan: Plan, scale: Scale) -> Iterator[str]:
    for i, (name, label, field) in enumerate(CURVES):
        places = scale.line((point.rows, getattr(point, field) * 1e3) for point in plan.batches)
        yield (
            f'<polyline id="{name}" class="curve {name}" points="{places}" clip-path="url(#area)"/>'
        )
        x = LEFT + 236 * i
        yield _line(x, 46, x + 20, 46, f"curve {name}")
        yield text(x + 26, 50, label)


def _limits(plan: Plan, scale: Scale, promise_ms: float) -> Iterator[str]:
    yield _line(LEFT, scale.y(promise_ms), RIGHT, scale.y(promise_ms), "limit")
    place = scale.y(promise_ms) - 5
    yield text(RIGHT, place, f"TPOT {promise_ms:g} ms", "limit-text", anchor="end")
    marks = (("admission", plan.limits.admission), ("memory", plan.limits.memory))
    for i, (name, rows) in enumerate(marks):
        label = f"{name}: {rows:,}"
        if rows > scale.max_x:
            label += " (further right)"
        x = scale.x(min(rows, scale.max_x))
        anchor, offset = ("end", -6) if x > (LEFT + RIGHT) / 2 else ("start", 6)
        yield _line(x, TOP, x, BOTTOM, "limit")
        yield text(x + offset, TOP + 14 + 18 * i, label, "limit-text", anchor=anchor)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'
