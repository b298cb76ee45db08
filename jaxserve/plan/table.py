"""A plan for people: tables that fit 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxserve.plan.result import Plan

WIDTH = 100


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print everything a plan says."""
    console = console or Console()
    card, ask = plan.card, plan.workload
    for line in (
        f"[bold]{escape(plan.model)} on {escape(card.name)}[/bold] ({escape(card.description)})",
        f"prompts p50 {ask.prompt_p50:,}, p95 {ask.prompt_p95:,}, max {ask.prompt_max:,} tokens; "
        f"outputs p50 {ask.output_p50:,}, p95 {ask.output_p95:,}",
        f"promise: TTFT under {_ms(plan.promise.ttft)} ms, TPOT under {_ms(plan.promise.tpot)} ms"
        + (" [bold](weights only)[/bold]" if plan.weights_only else ""),
    ):
        console.print(line, highlight=False)
    for table in (_sizes(plan), _limits(plan), _batches(plan), _prefills(plan)):
        console.print(table)
    for note in plan.notes:
        console.print(f"- {note}", markup=False, highlight=False, width=min(WIDTH, console.width))


def _sizes(plan: Plan) -> Table:
    card, speed = plan.card, plan.card.flops(plan.weight_dtype)
    return _table(
        "what it costs",
        [("", "left"), ("", "right"), ("", "left")],
        [
            (
                "weights",
                f"{plan.weight_bytes / 1e9:,.2f} GB",
                f"{_params(plan.num_params)} parameters in {plan.weight_dtype}",
            ),
            (
                "KV per token",
                f"{plan.kv_bytes_per_token / 1024:,.1f} KiB",
                f"in {plan.kv_dtype}; {plan.context:,.0f} tokens a sequence on average",
            ),
            (
                "cache",
                f"{plan.kv_memory_bytes / 1e9:,.1f} GB",
                f"of the card's {card.memory_bytes / 1e9:,.1f} GB",
            ),
            (
                "decode floor",
                f"{_ms(plan.floor_seconds)} ms",
                f"weights at {card.bandwidth / 1e9:,.0f} GB/s",
            ),
            (
                "one sequence alone",
                f"{plan.single_tokens_per_second:,.0f} tok/s",
                "its keys and values read too" if not plan.weights_only else "",
            ),
            (
                "compute-bound from",
                f"{plan.compute_bound_rows:,} rows",
                f"at {plan.mfu:.0%} of {speed / 1e12:,.4g} TFLOP/s",
            ),
        ],
    )


def _limits(plan: Plan) -> Table:
    limits = plan.limits
    return _table(
        "how many sequences at once",
        [("limit", "left"), ("sequences", "right"), ("because", "left")],
        [
            ("memory", f"{limits.memory:,}", "their keys and values fill the cache"),
            ("TPOT, decoding only", f"{limits.decode_only:,}", "if no prompt ever came"),
            (
                "TPOT and TTFT of a p95 prompt",
                f"{limits.ttft:,}",
                "while one is being prefilled in time",
            ),
            (
                "[bold]admission[/bold]",
                f"[bold]{limits.admission:,}[/bold]",
                f"TPOT, with {plan.prefill_share:,} prompt tokens or more in every step",
            ),
            ("chunk", f"{plan.chunk:,}", "prompt tokens a step that TPOT then leaves over"),
            (
                "token budget",
                f"{plan.token_budget:,}",
                f"a step; {plan.requests_per_second:,.1f} requests/s come and go",
            ),
        ],
    )


def _batches(plan: Plan) -> Table:
    marks = {
        plan.compute_bound_rows: "compute",
        plan.limits.memory: "memory",
        plan.limits.decode_only: "TPOT",
        plan.limits.ttft: "TTFT",
        plan.limits.admission: "admission",
    }
    return _table(
        "a step, by batch size",
        [
            ("rows", "right"),
            ("decode, no KV\nms", "right"),
            ("with KV reads\nms", "right"),
            ("TPOT with prefill\nms", "right"),
            ("room for prefill\ntokens", "right"),
            ("output\ntok/s", "right"),
            ("limit", "left"),
        ],
        [
            (
                f"{point.rows:,}",
                _ms(point.without_kv_seconds),
                _ms(point.decode_seconds),
                _ms(point.tpot_seconds),
                f"{point.prefill_left:,}",
                f"{point.tokens_per_second:,.0f}",
                marks.get(point.rows, ""),
            )
            for point in plan.batches
        ],
    )


def _prefills(plan: Plan) -> Table:
    return _table(
        "a prompt",
        [
            ("tokens", "right"),
            ("prefill alone\nms", "right"),
            (f"TTFT beside {plan.limits.admission:,} sequences\nms", "right"),
        ],
        [
            (
                f"{point.tokens:,}",
                _ms(point.alone_seconds),
                "never" if point.ttft_seconds is None else _ms(point.ttft_seconds),
            )
            for point in plan.prefills
        ],
    )


def _table(
    title: str, columns: Sequence[tuple[str, str]], rows: Sequence[tuple[str, ...]]
) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(name for name, _ in columns))
    for name, side in columns:
        table.add_column(name, justify="right" if side == "right" else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _params(count: int) -> str:
    return f"{count / 1e9:,.2f} billion" if count >= 1e9 else f"{count / 1e6:,.0f} million"
