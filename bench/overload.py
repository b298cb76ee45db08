"""What a server keeps of its promise when more is asked of it than it can carry.

    python -m bench.overload smollm2-135m-instruct --seconds 180 --load 2

First it finds out what the machine can carry: a server that promises nothing, and the most clients
for which it still keeps the promise, each with one request after the other. Then `jaxserve serve`
starts with the promise, and requests arrive independently of each other (Poisson) at `--load` times
that rate, whatever becomes of those before. A client that gets 429 sends its request again after
Retry-After, a few times.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.clients import Ask, Attempt, offer, saturate
from bench.measure import (
    BenchError,
    Point,
    Timeline,
    add_engine_flags,
    at_least,
    engine_flags,
    machine_facts,
    percentile,
    rounded,
    write_point,
)
from bench.program import exit_code
from bench.serve import Target, completion_body, connect, running_server, served_model
from jaxserve.simulate import Mix, poisson
from jaxserve.workload import Promise, Workload

WARM_UP = 1 / 3
"""Of the time that the capacity is measured in: not counted, the server fills up and learns."""
SUPPLY = 1000
"""Requests to measure it with; from the first one again when they are used up."""
CLIENTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
NO_PROMISE = {"ttft_ms": None, "tpot_ms": None, "percentile": None}
REFUSALS = re.compile(r'^jaxserve_refused_total\{reason="(\w+)"\} (\S+)$', re.MULTILINE)


async def find_capacity(flags: argparse.Namespace) -> float:
    """Requests a second that a server which promises nothing answers within the promise: as many
    clients as keep it, each with one request after the other.
    """
    silent = argparse.Namespace(**vars(flags) | NO_PROMISE)
    async with running_server(silent, "--no-promise") as target, connect(target.url) as session:
        model = await served_model(session)
        asks = make_asks(target, model, flags, rate=1.0, count=SUPPLY, seed=flags.seed + 1)
        supply = itertools.cycle(asks)
        capacity = 0.0
        for clients in flags.clients:
            found = await carry(session, supply, clients, flags)
            print(f"{clients} clients: {json.dumps(found)}", file=sys.stderr, flush=True)
            if not found:
                break
            if found["ttft_p95_ms"] >= flags.ttft_ms or found["tpot_p95_ms"] >= flags.tpot_ms:
                break
            capacity = max(capacity, found["answers_per_s"])
    if not capacity:
        raise BenchError(
            f"{flags.clients[0]} clients are not answered within TTFT {flags.ttft_ms:g} ms and "
            f"TPOT {flags.tpot_ms:g} ms: promise what this machine can keep"
        )
    return capacity


async def carry(
    session: aiohttp.ClientSession, supply: Iterator[Ask], clients: int, flags: argparse.Namespace
) -> dict[str, float]:
    """How many requests a second so many clients are answered, and how quickly; empty if none is
    answered in the time there is."""
    seconds, percent = float(flags.calibrate_seconds), float(flags.percentile)
    begin = time.perf_counter()
    answers = await saturate(session, supply, seconds, clients)
    start, stop = begin + WARM_UP * seconds, begin + seconds
    counted = [each for each in answers if start <= each.last < stop]
    if not counted:
        return {}
    return {
        "answers_per_s": rounded(len(counted) / (stop - start)),
        "ttft_p95_ms": percentile([1e3 * each.ttft for each in counted], percent),
        "tpot_p95_ms": percentile([1e3 * each.tpot for each in counted], percent),
    }


def keeps(timeline: Timeline, promise: Promise) -> bool:
    return timeline.ttft < promise.ttft and timeline.tpot < promise.tpot


def make_asks(
    target: Target, model: str, flags: argparse.Namespace, *, rate: float, count: int, seed: int
) -> list[Ask]:
    """Requests of the lengths asked for, at random times. No two prompts are alike."""
    draw = random.Random(seed)
    asks = []
    for arrival in poisson(Mix("overload", workload(flags)), count, rate, seed):
        prompt = [draw.randrange(target.vocab_size) for _ in arrival.request.prompt_ids]
        num_tokens = max(2, arrival.request.sampling.max_tokens)  # one token has no TPOT
        asks.append(Ask(arrival.at, completion_body(model, prompt, num_tokens), num_tokens))
    return asks


def workload(flags: argparse.Namespace) -> Workload:
    """The lengths asked for."""
    return Workload(
        flags.prompt_p50, flags.prompt_p95, flags.prompt_max, flags.output_p50, flags.output_p95
    )


def figures(requests: Sequence[Sequence[Attempt]], promise: Promise, seconds: float) -> Point:
    """What became of them. Times in ms; shares of what their names say.

    Raises BenchError if nobody was let in.
    """
    first = [attempts[0] for attempts in requests]
    retries = [each for attempts in requests for each in attempts[1:]]
    served = [t for each in (*first, *retries) if (t := each.timeline) is not None]
    refused = [1e3 * (e.answered - e.sent) for e in (*first, *retries) if e.timeline is None]
    if not served:
        raise BenchError("nobody was let in")
    ttft = [timeline.ttft for timeline in served]
    tpot = [timeline.tpot for timeline in served]
    point: Point = {
        "requests": len(requests),
        "ttft_p50_ms": percentile([1e3 * each for each in ttft], 50),
        "ttft_p95_ms": percentile([1e3 * each for each in ttft], promise.percentile),
        "tpot_p50_ms": percentile([1e3 * each for each in tpot], 50),
        "tpot_p95_ms": percentile([1e3 * each for each in tpot], promise.percentile),
        "ttft_kept": share(each < promise.ttft for each in ttft),
        "tpot_kept": share(each < promise.tpot for each in tpot),
        "goodput_per_s": rounded(sum(keeps(each, promise) for each in served) / seconds),
        "first_attempts_admitted": share(each.timeline is not None for each in first),
        "served_in_the_end": share(each[-1].timeline is not None for each in requests),
        "refusals": len(refused),
        "retries": len(retries),
    }
    if refused:
        point["refusal_p50_ms"] = percentile(refused, 50)
        point["refusal_p95_ms"] = percentile(refused, 95)
    if retries:
        point["retries_admitted"] = share(each.timeline is not None for each in retries)
        waits = [each.retry_after for each in (*first, *retries) if each.timeline is None]
        point["retry_after_p50_s"] = percentile(waits, 50)
    return point


def share(outcomes: Iterable[bool]) -> float:
    """Of the outcomes, those that are true."""
    found = list(outcomes)
    return rounded(sum(found) / len(found))


async def measure(target: Target, capacity: float, flags: argparse.Namespace) -> Point:
    """Offer a multiple of the capacity."""
    rate = flags.load * capacity
    count = max(1, round(rate * flags.seconds))
    async with connect(target.url) as session:
        model = await served_model(session)
        asks = make_asks(target, model, flags, rate=rate, count=count, seed=flags.seed)
        requests = await offer(session, asks, flags.seconds, flags.retries)
        refused = await refusals(session)
    return {
        "bench": "overload",
        "model": model,
        "engine": target.engine,
        **engine_flags(flags),
        **{name: getattr(flags, name) for name in LENGTHS},
        "capacity_per_s": rounded(capacity),
        "load": flags.load,
        "seconds": flags.seconds,
        **figures(requests, promised(flags), flags.seconds),
        **{f"refused_{reason}": count for reason, count in refused.items()},
        **machine_facts(),
    }


async def refusals(session: aiohttp.ClientSession) -> dict[str, float]:
    """How many requests the server refused so far, by its reason."""
    async with session.get("/metrics") as response:
        return {why: float(count) for why, count in REFUSALS.findall(await response.text())}


async def run(flags: argparse.Namespace) -> Point:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    promised(flags)  # complain before a server is started
    workload(flags)
    capacity = flags.capacity
    if capacity is None:
        capacity = await find_capacity(flags)
    async with running_server(flags) as target:
        print(f"measuring {target.url}", file=sys.stderr, flush=True)
        return await measure(target, capacity, flags)


def promised(flags: argparse.Namespace) -> Promise:
    """The promise asked for."""
    return Promise(flags.ttft_ms / 1e3, flags.tpot_ms / 1e3, flags.percentile)


LENGTHS = {
    "prompt_p50": 100,
    "prompt_p95": 300,
    "prompt_max": 1000,
    "output_p50": 32,
    "output_p95": 100,
}
"""Tokens. Log-normal through the two percentiles, as in `jaxserve plan`."""


def read_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__)
    add_engine_flags(parser)
    parser.add_argument("--ttft-ms", type=float, default=4000.0, help="promised")
    parser.add_argument("--tpot-ms", type=float, default=250.0, help="promised")
    parser.add_argument("--percentile", type=float, default=95.0, help="of the requests, promised")
    parser.add_argument("--seconds", type=float, default=180.0, help="that requests arrive")
    parser.add_argument("--load", type=float, default=2.0, help="times the capacity")
    parser.add_argument(
        "--capacity", type=float, metavar="REQ/S", help="unset: measured in the same run"
    )
    parser.add_argument(
        "--calibrate-seconds", type=float, default=20.0, help="to try a number of clients"
    )
    parser.add_argument(
        "--clients",
        type=at_least(1),
        nargs="+",
        default=CLIENTS,
        metavar="N",
        help="to try, rising",
    )
    parser.add_argument("--retries", type=at_least(0), default=5, help="of a refused request")
    for name, tokens in LENGTHS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=at_least(1), default=tokens, metavar="TOKENS")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and prompts")
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the line to FILE too")
    return parser.parse_args(argv)


def print_report(point: Point, console: Console) -> None:
    """The figures for a person, beside what was promised."""
    table = Table("", "measured", "promised", box=None)
    promised = {"ttft_p95_ms": f"{point['ttft_ms']:g}", "tpot_p95_ms": f"{point['tpot_ms']:g}"}
    kept = f"{point['percentile']:g} %"
    promised |= {"ttft_kept": kept, "tpot_kept": kept}
    names = list(point)
    for name in names[names.index("capacity_per_s") : names.index("cpu")]:
        table.add_row(name, f"{point[name]}", promised.get(name, ""))
    console.print(table)


def report(flags: argparse.Namespace) -> None:
    """Measure, write and show."""
    point = asyncio.run(run(flags))
    write_point(point, sys.stdout, flags.out)
    print_report(point, Console(stderr=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. A line of JSON goes to stdout, everything for people to stderr."""
    flags = read_flags(argv)
    return exit_code(partial(report, flags))


if __name__ == "__main__":
    sys.exit(main())
