"""Ours and other servers, on the same weights, the same prompts and the same machine, by turns.

    python -m bench.compare smollm2-135m-instruct --gguf smollm2-f16.gguf smollm2-f32.gguf \\
        --llama-server build/bin/llama-server --openvino venv/bin/python --out compare.json

Every engine runs `--runs` times, one after the other and then all of them again, so that what else
the machine does falls on all alike. A peer that is not given is listed as missing. How each is
installed: bench/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.measure import (
    WARM_UP_TOKENS,
    BenchError,
    Point,
    Round,
    Timeline,
    add_flags,
    machine_facts,
    percentile,
    random_prompts,
    rounded,
)
from bench.serve import connect, run_round, running_server, served_model, stop
from checkpoints import Store, open_checkpoint

PEERS = ("llama-server", "vllm", "openvino-genai")


@dataclass(frozen=True, slots=True)
class Work:
    """One point: so many requests at once, of so many prompt tokens."""

    concurrency: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Running:
    """An engine that is ready. pid: of its first process. url: None if it has no server."""

    pid: int
    url: str | None
    process: asyncio.subprocess.Process | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """What is compared. start: brings it up, and takes it down in the end."""

    name: str
    precision: str
    start: Callable[[], AbstractAsyncContextManager[Running]]


def engines(flags: argparse.Namespace) -> Iterator[Engine]:
    """Ours in every precision asked for, and the peers that are there."""
    for precision in flags.ours:
        yield Engine("jaxserve", precision, partial(ours, flags, precision))
    for path in flags.gguf:
        precision = path.stem.rsplit("-", 1)[-1]
        if flags.llama_server:
            yield Engine("llama-server", precision, partial(llama, flags, path))
        if flags.openvino and precision != "f32":  # it does not read float32 GGUF
            yield Engine("openvino-genai", precision, partial(openvino, flags, path))
    if flags.vllm:
        yield Engine("vllm", "f32", partial(vllm, flags))


@asynccontextmanager
async def ours(flags: argparse.Namespace, precision: str) -> AsyncIterator[Running]:
    settings = argparse.Namespace(**vars(flags))
    settings.dtype = {"f32": "float32", "bf16": "bfloat16", "int8": "float32"}[precision]
    more = ("--weights", "int8") if precision == "int8" else ()
    async with running_server(settings, *more) as target:
        yield Running(target.pid, target.url)


@asynccontextmanager
async def served(command: Sequence[str], port: int, timeout: float) -> AsyncIterator[Running]:
    """A peer's server, from its start until the block is left. Its log goes to stderr."""
    process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(timeout), aiohttp.ClientSession(url) as session:
            while not await is_ready(session):
                if process.returncode is not None:
                    raise BenchError(f"{command[0]} ended with {process.returncode}")
                await asyncio.sleep(0.2)
        yield Running(process.pid, url)
    finally:
        await stop(process)


async def is_ready(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def llama(flags: argparse.Namespace, path: Path) -> AbstractAsyncContextManager[Running]:
    rows = max(flags.concurrency)
    context = rows * (max(flags.prompts) + flags.output_tokens + 16)
    command = [str(flags.llama_server), "-m", str(path), "--port", str(flags.peer_port)]
    command += ["-np", str(rows), "-c", str(context), "-t", str(flags.threads)]
    return served(command, flags.peer_port, flags.start_timeout)


def vllm(flags: argparse.Namespace) -> AbstractAsyncContextManager[Running]:
    command = [str(flags.vllm), "serve", str(flags.hf), "--port", str(flags.peer_port)]
    command += ["--dtype", "float32", "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", str(max(flags.concurrency))]
    command += ["--max-model-len", str(max(flags.prompts) + flags.output_tokens + 16)]
    return served(command, flags.peer_port, flags.start_timeout)


@asynccontextmanager
async def openvino(flags: argparse.Namespace, path: Path) -> AsyncIterator[Running]:
    script = Path(__file__).with_name("openvino_peer.py")
    process = await asyncio.create_subprocess_exec(
        str(flags.openvino),
        str(script),
        str(path),
        str(max(flags.concurrency)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
    )
    try:
        yield Running(process.pid, None, process)
    finally:
        await stop(process)


async def run_engine(
    running: Running, works: Sequence[Work], flags: argparse.Namespace, vocab_size: int, seed: int
) -> AsyncIterator[tuple[Work, Round]]:
    """Every point once, each after a short round that warms up."""
    for work in works:
        prompts = random_prompts(work.concurrency, work.prompt, vocab_size, seed)
        warm, measured = islice(prompts, 2)
        short = min(WARM_UP_TOKENS, flags.output_tokens)
        if running.url is None:
            assert running.process is not None
            await in_process(running.process, warm, short)
            yield work, await in_process(running.process, measured, flags.output_tokens)
            continue
        async with connect(running.url) as session:
            model = await served_model(session)
            await run_round(session, model, warm, short)
            yield work, await run_round(session, model, measured, flags.output_tokens)


async def in_process(
    process: asyncio.subprocess.Process, prompts: Sequence[Sequence[int]], num_tokens: int
) -> Round:
    """Hand the requests to a peer that has no server: a line of JSON there, one back."""
    assert process.stdin is not None and process.stdout is not None
    request = {"prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    await process.stdin.drain()
    line = await process.stdout.readline()
    if not line:
        raise BenchError("the peer ended: its last lines are above")
    answer = json.loads(line)
    timelines = tuple(Timeline(0.0, first, last, num_tokens) for first, last in answer["requests"])
    return Round(answer["seconds"], timelines)


def peak_mb(pid: int) -> float:
    """The most memory that a process and its descendants have held, added up, in MB."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            total += peak_mb(int(child))
    status = Path(f"/proc/{pid}/status").read_text()
    return total + int(status.split("VmHWM:")[1].split()[0]) / 1000


async def compare(flags: argparse.Namespace) -> tuple[list[Point], list[str]]:
    """The points, and what became of engines that failed: what they did before counts."""
    vocab_size = open_checkpoint(flags.model, Store(flags.store)).config.vocab_size
    works = [Work(c, p) for p, c in product(flags.prompts, flags.concurrency)]
    found: dict[tuple[str, str, Work], list[Round]] = {}
    peaks: dict[tuple[str, str], float] = {}
    failed: list[str] = []
    for run, engine in product(range(flags.runs), list(engines(flags))):
        key = (engine.name, engine.precision)
        try:
            async with engine.start() as running:
                async for work, measured in run_engine(running, works, flags, vocab_size, run):
                    found.setdefault((*key, work), []).append(measured)
                    peaks[key] = max(peaks.get(key, 0.0), peak_mb(running.pid))
                    rate = output_rate(measured)
                    print(f"run {run}: {' '.join(key)} {work}: {rate:.4g} tok/s", file=sys.stderr)
        except (BenchError, aiohttp.ClientError, TimeoutError) as error:
            failed.append(f"{' '.join(key)}, run {run}: {error or type(error).__name__}")
    points = [point(key, rounds, peaks[key[0], key[1]]) for key, rounds in found.items()]
    return points, failed


def output_rate(measured: Round) -> float:
    return sum(each.num_tokens for each in measured.requests) / measured.seconds


def point(key: tuple[str, str, Work], rounds: Sequence[Round], rss_mb: float) -> Point:
    name, precision, work = key
    rates = [output_rate(each) for each in rounds]
    requests = [request for each in rounds for request in each.requests]
    return {
        "engine": name,
        "precision": precision,
        "concurrency": work.concurrency,
        "prompt": work.prompt,
        "output_tok_s": rounded(statistics.median(rates)),
        "output_tok_s_range": [rounded(min(rates)), rounded(max(rates))],
        "ttft_p95_ms": percentile([1e3 * each.ttft for each in requests], 95),
        "tpot_p95_ms": percentile([1e3 * each.tpot for each in requests], 95),
        "rss_mb": rounded(rss_mb),
        "runs": len(rounds),
    }


def print_points(points: Sequence[Point], failed: Sequence[str]) -> None:
    table = Table("engine", "precision", "prompt", "C", "tok/s", "range", "ratio", "TTFT p95 ms")
    own = {
        (p["prompt"], p["concurrency"]): p["output_tok_s"]
        for p in reversed(points)
        if p["engine"] == "jaxserve"
    }
    for p in sorted(points, key=lambda p: (str(p["prompt"]), int(str(p["concurrency"])))):
        rate = float(str(p["output_tok_s"]))
        ratio = float(str(own.get((p["prompt"], p["concurrency"]), "nan"))) / rate
        cells = [p["engine"], p["precision"], p["prompt"], p["concurrency"], rate]
        cells += [p["output_tok_s_range"], f"{ratio:.2f}", p["ttft_p95_ms"]]
        table.add_row(*map(str, cells))
    console = Console(stderr=True, width=120)
    console.print(table)
    there = {point["engine"] for point in points}
    missing = ", ".join(peer for peer in PEERS if peer not in there)
    console.print(f"ratio: our first precision over this one. Missing: {missing or 'none'}")
    for line in failed:
        console.print(f"failed: {line}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    add_flags(parser)
    parser.set_defaults(concurrency=[1, 8, 16, 32, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ours", nargs="+", default=["f32"], choices=("f32", "bf16", "int8"))
    parser.add_argument(
        "--gguf", type=Path, nargs="*", default=[], help="NAME-f16.gguf and the like"
    )
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--openvino", type=Path, help="a Python that has openvino-genai")
    parser.add_argument("--vllm", type=Path, help="vllm's command, of a CPU build")
    parser.add_argument("--hf", type=Path, help="the model's Hugging Face folder, for --vllm")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-port", type=int, default=8377)
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args(argv)
    points, failed = asyncio.run(compare(flags))
    print_points(points, failed)
    if flags.out:
        flags.out.write_text(json.dumps([p | machine_facts() for p in points], indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
