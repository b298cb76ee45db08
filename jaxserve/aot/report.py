"""A survey for people: tables that fit 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from jaxserve.aot.kernels import Kernel
from jaxserve.aot.result import StepReport, Survey


def print_survey(survey: Survey, console: Console | None = None) -> None:
    """Print what a person wants to know; the JSON has the rest."""
    console = console or Console()
    sizes = survey.sizes
    dtypes = sizes.dtype if sizes.kv == "auto" else f"{sizes.dtype}, {sizes.kv} cache"
    for line in (
        f"[bold]{escape(survey.model)} on {escape(survey.gpu)}[/bold], compiled without one by "
        f"jax {survey.jax_version}",
        f"{sizes.max_rows} rows, {sizes.token_budget} tokens a step, pages of {sizes.page_size}, "
        f"context {sizes.max_context:,}, {dtypes}, attention {survey.attention}",
    ):
        console.print(line, highlight=False)
    for table in (_memory(survey), _steps(survey), _traffic(survey), _kernels(survey)):
        console.print(table)
    for note in _notes(survey):
        console.print(f"- {note}", markup=False, highlight=False)


def _memory(survey: Survey) -> Table:
    share = survey.sizes.memory_fraction
    tokens = max(0, survey.pages - 1) * survey.sizes.page_size
    rows = [
        ("weights", _gb(survey.weight_bytes), ""),
        ("cache", _gb(survey.cache_bytes), f"{survey.pages:,} pages, {tokens:,} tokens"),
        ("of it updated in place", _gb(survey.alias_bytes), ""),
        ("a step's temporaries", _gb(survey.temp_bytes), ""),
        ("the card", _gb(survey.memory_bytes), f"of which {share:.0%} may be filled"),
        ("fits", "yes" if survey.fits else "no", "" if survey.fits else "no room for any page"),
    ]
    return _table("memory", ["", ">", ""], rows)


def _steps(survey: Survey) -> Table:
    rows = [
        (
            step.name,
            f"{step.tokens:,}",
            f"{step.rows:,}",
            f"{step.max_pages:,}",
            f"{step.compile_seconds:,.0f}",
            f"{step.temp_bytes / 1e9:,.2f}",
            f"{step.launches:,}",
            f"{step.kernels_per_layer:,}",
            f"{step.host_waits:,}",
            f"{len(step.copies):,}",
        )
        for step in survey.steps
    ]
    columns = ["step", ">tokens", ">rows", ">pages\na row", ">compiled\ns", ">temp.\nGB"]
    columns += [">kernels", ">a layer", ">host\nwaits", ">copies"]
    return _table("compiled steps", columns, rows)


def _traffic(survey: Survey) -> Table:
    counted = [step for step in survey.steps if step.least_bytes is not None]
    rows = [
        (
            step.name,
            _number(None if step.bytes is None else step.bytes / 1e9, 2),
            _number(None if step.least_bytes is None else step.least_bytes / 1e9, 2),
            _number(step.bytes_ratio, 3),
            _number(None if step.flops is None else step.flops / 1e12, 2),
            _number(None if step.least_flops is None else step.least_flops / 1e12, 2),
            _number(step.floor_ms, 2),
            _number(step.predicted_ms, 2),
        )
        for step in counted
    ]
    columns = ["step", ">moved\nGB", ">least\nGB", ">ratio", ">TFLOP", ">least", ">floor\nms"]
    return _table("memory traffic, counted", [*columns, ">predicted\nms"], rows)


def _kernels(survey: Survey) -> Table:
    ours = [kernel for kernel in survey.kernels if kernel.custom]
    others = [kernel for kernel in survey.kernels if not kernel.custom]
    rows = [_kernel(kernel.name, [kernel]) for kernel in ours]
    if others:
        rows.append(_kernel(f"{len(others)} of XLA's, the most of any", others))
    columns = ["kernel", ">registers", ">spilled\nbytes", ">stack\nbytes", ">shared\nbytes"]
    return _table("kernels, as assembled", columns, rows)


def _kernel(name: str, kernels: Sequence[Kernel]) -> tuple[str, ...]:
    return (
        name,
        f"{max(kernel.registers for kernel in kernels):,}",
        f"{max(kernel.spill_bytes for kernel in kernels):,}",
        f"{max(kernel.stack_bytes for kernel in kernels):,}",
        f"{max(kernel.shared_bytes for kernel in kernels):,}",
    )


def _notes(survey: Survey) -> list[str]:
    notes = [
        "Nothing here was measured: compilation facts, and times predicted from published rates.",
        "Matrix products are cuBLAS's, which picks its kernels on the card: they are not listed.",
    ]
    if any(_is_open(step) for step in survey.steps):
        notes.append(
            "Steps without a count loop until their data say stop, or have kernels that do not "
            "declare their cost."
        )
    notes += [f"{step.name}: {copy}" for step in survey.steps for copy in step.copies[:3]]
    return notes


def _is_open(step: StepReport) -> bool:
    return step.least_bytes is not None and step.bytes is None


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """A column whose name begins with > is one of numbers."""
    table = Table(
        title=title, title_justify="left", show_header=any(name.strip(">") for name in columns)
    )
    for name in columns:
        side: JustifyMethod = "right" if name[:1] == ">" else "left"
        table.add_column(name.removeprefix(">"), justify=side, no_wrap=side == "right")
    for row in rows:
        table.add_row(*row)
    return table


def _gb(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:,.2f} GB"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
