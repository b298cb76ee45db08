"""What the host does for each step, without a device: schedule, pack, commit.

    python -m bench.host --rows 64 256 --context 1000

Rows decode at staggered lengths around `--context`; each commit appends a token to every row. The
two lines of a point differ in prefix reuse, whose prompts share nothing: its cost at 0% hits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

from bench.measure import at_least, machine_facts
from jaxserve.packing import choose_shape, pack, step_shapes
from jaxserve.pages import PagePool
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Drawn

PAGE_SIZE = 16


def measure(rows: int, context: int, steps: int, *, prefix_reuse: bool) -> dict[str, object]:
    """Median microseconds of each part over `steps` decode steps of `rows` rows."""
    longest = 2 * context + steps
    scheduler = Scheduler(
        PagePool(1 + rows * -(-longest // PAGE_SIZE), PAGE_SIZE),
        max_rows=rows,
        token_budget=max(rows, 1024),
        max_context=longest,
        prefix_reuse=prefix_reuse,
    )
    shapes = step_shapes(
        max_rows=rows,
        token_budget=scheduler.token_budget,
        max_context=longest,
        page_size=PAGE_SIZE,
    )
    for row in range(rows):
        prompt = tuple((row * 31 + i) % 50_000 for i in range(context // 2 + row * context // rows))
        scheduler.add(Request(str(row), prompt, SamplingParams(steps + 100)))
    while any(s.num_pending > 1 for s in scheduler.running) or scheduler.waiting:
        spans = scheduler.schedule()
        scheduler.commit(spans, [Drawn(7)] * len(spans))
    times: dict[str, list[float]] = {"schedule": [], "pack": [], "commit": []}
    for _ in range(steps):
        start = time.perf_counter()
        spans = scheduler.schedule()
        scheduled = time.perf_counter()
        pack(spans, choose_shape(shapes, spans))
        packed = time.perf_counter()
        scheduler.commit(spans, [Drawn(7)] * len(spans))
        times["schedule"].append(scheduled - start)
        times["pack"].append(packed - scheduled)
        times["commit"].append(time.perf_counter() - packed)
    medians = {f"{name}_us": 1e6 * statistics.median(each) for name, each in times.items()}
    return {
        "bench": "host",
        "rows": rows,
        "context": context,
        "prefix_reuse": prefix_reuse,
        **{name: round(value, 1) for name, value in medians.items()},
        "total_us": round(sum(medians.values()), 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[64, 256])
    parser.add_argument("--context", type=at_least(1), default=1000, help="tokens per row, about")
    parser.add_argument("--steps", type=at_least(1), default=200)
    flags = parser.parse_args(argv)
    for rows in flags.rows:
        for prefix_reuse in (True, False):
            point = measure(rows, flags.context, flags.steps, prefix_reuse=prefix_reuse)
            print(json.dumps({**point, **machine_facts()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
