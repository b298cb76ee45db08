"""A server, measured from a client in a process of its own.

    python -m bench.serve MODEL --concurrency 1 8 32 64 --json results.jsonl
    python -m bench.serve --url http://127.0.0.1:8000 --vocab-size 49152

Without --url it starts `jaxserve serve` on a free port, and stops it at the end. Any server that
answers /v1/models and streams /v1/completions of token ids can be measured with --url.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from rich.console import Console

from bench.measure import (
    WARM_UP_TOKENS,
    BenchError,
    Point,
    Round,
    Timeline,
    add_flags,
    at_least,
    engine_flags,
    facts,
    figures,
    print_table,
    random_prompts,
    write_point,
)
from bench.program import exit_code
from checkpoints import Store, open_checkpoint

READY = re.compile(r"jaxserve ready on (?P<url>\S+) \(model .*?, (?P<engine>.*)\)")
STOP_TIMEOUT = 20.0
"""Seconds a server gets to stop after SIGTERM."""
SILENCE_TIMEOUT = 600.0
"""Seconds without a byte after which a stream counts as lost."""
COMPLETIONS = "/v1/completions"
DATA, DONE = b"data: ", b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure.

    Attributes:
        url: of its root. engine: what it says about itself. vocab_size: of its model.
        pid: of its first process; 0 if somebody else started it.
    """

    url: str
    engine: str
    vocab_size: int
    pid: int = 0


@asynccontextmanager
async def running_server(flags: argparse.Namespace, *more: str) -> AsyncIterator[Target]:
    """`jaxserve serve` in a process of its own, gone when the block is left. `more`: flags."""
    vocab_size = open_checkpoint(flags.model, Store(flags.store)).config.vocab_size
    command = [sys.executable, "-m", "jaxserve", "serve", flags.model]
    command += ["--port", "0", "--store", str(flags.store)]
    for name, value in engine_flags(flags).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    command += more
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        line = await first_line(process, flags.start_timeout)
        ready = READY.match(line)
        if ready is None:
            raise BenchError(f"the server did not start; it said {line!r}, and the lines above")
        yield Target(ready["url"], ready["engine"], vocab_size, process.pid)
    finally:
        await stop(process)


async def first_line(process: asyncio.subprocess.Process, timeout: float) -> str:
    """What the server says when it is ready, or nothing if it ended instead."""
    assert process.stdout is not None  # it was asked for
    try:
        async with asyncio.timeout(timeout):
            return (await process.stdout.readline()).decode()
    except TimeoutError:
        raise BenchError(
            f"the server was not ready after {timeout:g} s: raise --start-timeout"
        ) from None


async def stop(process: asyncio.subprocess.Process) -> None:
    """Ask the server to go, and insist if it does not. Its worker goes with it."""
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def stream(session: aiohttp.ClientSession, body: bytes, num_tokens: int) -> Timeline:
    """Send one request, and note when its first and last token come."""
    sent = time.perf_counter()
    async with session.post(COMPLETIONS, data=body) as response:
        if response.status != 200:
            raise BenchError(f"status {response.status}: {await response.text()}")
        found = await read_stream(response, sent)
    if found.num_tokens != num_tokens:
        raise BenchError(
            f"{found.num_tokens} tokens came, {num_tokens} were asked for: ignore_eos is ignored"
        )
    return found


async def read_stream(response: aiohttp.ClientResponse, sent: float) -> Timeline:
    """Read an answer to its end.

    Events are only read while the clock runs, and looked into afterwards: the client should
    take as little as it can of a machine that it shares with the server.
    """
    events: list[tuple[float, bytes]] = []
    async for line in response.content:
        if line.startswith(DATA):
            events.append((time.perf_counter(), line))
    if len(events) < 3 or not events[-1][1].startswith(DONE):
        raise BenchError(f"a stream broke off: {events[-1][1]!r}" if events else "an empty stream")
    num_tokens = json.loads(events[-2][1].removeprefix(DATA))["usage"]["completion_tokens"]
    return Timeline(sent, events[0][0], events[-3][0], num_tokens)


def completion_body(model: str, prompt: Sequence[int], num_tokens: int) -> bytes:
    """A greedy request for exactly so many tokens, streamed, with a count at the end."""
    settings = {
        "model": model,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(settings | {"prompt": prompt}).encode()


async def run_round(
    session: aiohttp.ClientSession, model: str, prompts: Sequence[Sequence[int]], num_tokens: int
) -> Round:
    """Send all prompts at once."""
    bodies = [completion_body(model, prompt, num_tokens) for prompt in prompts]
    started = time.perf_counter()
    timelines = await asyncio.gather(*(stream(session, body, num_tokens) for body in bodies))
    return Round(max(each.last for each in timelines) - started, tuple(timelines))


async def served_model(session: aiohttp.ClientSession) -> str:
    """What the server calls its model."""
    async with session.get("/v1/models") as response:
        response.raise_for_status()
        models = (await response.json())["data"]
    if not models:
        raise BenchError("the server serves no model: start it with one")
    name: str = models[0]["id"]
    return name


def connect(url: str) -> aiohttp.ClientSession:
    """As many connections as there are requests, a new one for each, and patience. Some servers
    close one that they left open just when it is used again."""
    return aiohttp.ClientSession(
        url,
        headers={"Content-Type": "application/json"},
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENCE_TIMEOUT),
    )


async def measure(
    session: aiohttp.ClientSession, target: Target, flags: argparse.Namespace, concurrency: int
) -> Point:
    """One point: a round to warm up, then the measured ones."""
    model = await served_model(session)
    prompts = random_prompts(concurrency, flags.prompt_tokens, target.vocab_size, flags.seed)
    warm_up = min(WARM_UP_TOKENS, flags.output_tokens)
    await run_round(session, model, next(prompts), warm_up)
    rounds = [
        await run_round(session, model, each, flags.output_tokens)
        for each in itertools.islice(prompts, flags.repeats)
    ]
    device, dtype, *_ = [*target.engine.split(", "), "unknown"]
    return {
        **facts("serve", flags, concurrency),
        "model": model,
        "device": device,
        "dtype": dtype,
        "engine": target.engine,
        **figures(rounds),
    }


async def measure_all(target: Target, flags: argparse.Namespace) -> list[Point]:
    points = []
    async with connect(target.url) as session:
        for concurrency in flags.concurrency:
            points.append(await measure(session, target, flags, concurrency))
            write_point(points[-1], sys.stdout, flags.json)
    return points


async def run(flags: argparse.Namespace) -> list[Point]:
    task = asyncio.current_task()
    assert task is not None  # a coroutine runs in one
    # As Ctrl-C does: leave every block properly, so that the server goes too.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    if flags.url is not None:
        return await measure_all(Target(flags.url, "unknown", flags.vocab_size), flags)
    async with running_server(flags) as target:
        return await measure_all(target, flags)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Lines of JSON go to stdout, everything for people to stderr."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    add_flags(parser)
    parser.add_argument("--url", help="of a running server, to measure that one")
    parser.add_argument(
        "--vocab-size", type=at_least(1), metavar="V", help="with --url: prompts use ids below V"
    )
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS")
    flags = parser.parse_args(argv)
    if (flags.url is None) != (flags.vocab_size is None):
        parser.error("--url and --vocab-size go together")
    return exit_code(lambda: print_table(asyncio.run(run(flags)), Console(stderr=True)))


if __name__ == "__main__":
    sys.exit(main())
