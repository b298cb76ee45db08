"""Everything there is to know on a card, in one call of less than eight minutes.

    python -m bench.gpu_check --out check.json

The card's own rates, every kernel against the reference, kernels and steps against those rates, the
engine end to end; weights are random. Without a GPU the same runs at tiny sizes, kernels in Pallas'
interpret mode: to see that it runs. Exit code 1: a kernel disagrees, or a stage failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.gpu.stage import PROCESSES, Given, Outcome, Rates, Stage, run_stage
from bench.measure import Point, machine_facts

STAGES = (
    Stage("rates", "bench.gpu.rates:run", 45),
    Stage("agreement", "bench.gpu.agreement:run", 100),
    Stage("kernels", "bench.gpu.kernels:run", 115),
    Stage("step", "bench.gpu.step:run", 125),
    Stage("engine", "bench.gpu.engine:run", 90),
)
"""In this order; 475 seconds in all."""
WIDTH = 180
"""Of the tables: a file that stdout is sent to has no width of its own."""


def check(cache: Path, console: Console, out: Path | None) -> list[Outcome]:
    """All stages. The file is written after each of them: what there is survives what follows."""
    given, outcomes = Given(cache), []
    for stage in STAGES:
        outcomes.append(run_stage(stage, given))
        show(outcomes[-1], console)
        if stage.name == "rates":
            given = replace(given, rates=measured_rates(outcomes[-1].points))
            if platform(outcomes) == "cpu":
                console.print(
                    "no GPU here: tiny sizes, kernels in interpret mode, and no time means anything"
                )
        if stage.name == "agreement":
            given = replace(given, mosaic=mosaic_agrees(outcomes[-1]))
        if out is not None:
            out.write_text(json.dumps(report(outcomes), indent=1) + "\n")
    return outcomes


def measured_rates(points: Sequence[Point]) -> Rates | None:
    """What the first stage found, if it came so far."""
    by_name = {point["figure"]: point for point in points}
    if not {"copy", "bf16 matmul"} <= by_name.keys():
        return None
    bandwidth, flops = by_name["copy"]["value"], by_name["bf16 matmul"]["value"]
    assert isinstance(bandwidth, float) and isinstance(flops, float)
    return Rates(bandwidth * 1e9, flops * 1e12)


def mosaic_agrees(outcome: Outcome) -> bool:
    """Whether the kernels for Hopper are fit to be timed: they ran, last of all in their stage, it
    came to its end, and they were right."""
    mosaic = [point for point in outcome.points if point["dialect"] == "mosaic"]
    return outcome.ended == "done" and bool(mosaic) and all(point["agrees"] for point in mosaic)


def platform(outcomes: Sequence[Outcome]) -> str:
    """What jax calls the device; "unknown" if even that did not come out."""
    first = outcomes[0].points[:1]
    return str(first[0]["platform"]) if first else "unknown"


def report(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """All of it, for a program."""
    return {
        "bench": "gpu_check",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine_facts(),
        "platform": platform(outcomes),
        "passed": passed(outcomes),
        "stages": [asdict(outcome) for outcome in outcomes],
    }


def passed(outcomes: Sequence[Outcome]) -> bool:
    """Whether no stage failed and nothing disagrees. A stage that was cut has not failed."""
    points = [point for outcome in outcomes for point in outcome.points]
    return not (
        any(outcome.ended == "failed" for outcome in outcomes)
        or any(not point.get("agrees", True) for point in points)
    )


def show(outcome: Outcome, console: Console) -> None:
    """A stage's points as a table, and how it ended."""
    keys = list(dict.fromkeys(key for point in outcome.points for key in point))
    if keys:
        table = Table(*keys, box=None, title=outcome.stage, title_justify="left")
        for point in outcome.points:
            table.add_row(*(str(point.get(key, "")) for key in keys))
        console.print(table)
    why = f": {outcome.error}" if outcome.error else ""
    console.print(
        f"{outcome.stage}: {outcome.ended} after {outcome.seconds:g} s{why}", markup=False
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check. Tables go to stdout, tracebacks to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything there, as JSON")
    flags = parser.parse_args(argv)
    PROCESSES.set_forkserver_preload([stage.entry.partition(":")[0] for stage in STAGES])
    try:
        if flags.out is not None:
            flags.out.touch()
        with tempfile.TemporaryDirectory() as cache:
            outcomes = check(Path(cache), Console(width=WIDTH), flags.out)
    except OSError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130
    return 0 if passed(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
