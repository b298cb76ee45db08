"""What `jaxserve bench` can be told."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from jaxserve.bench.figures import LATENCIES
from jaxserve.chat.flags import add_url
from jaxserve.flags.model import add_model, add_store
from jaxserve.flags.settings import Parser
from jaxserve.flags.types import amount, natural, positive
from jaxserve.offline.flags import add_offline_engine


def add_bench(make: Callable[[str, str], Parser]) -> None:
    """The four benchmarks. `make` adds a command by its name and what it says of itself."""
    add_serve(make("serve", "one load on any server of the OpenAI API"))
    add_sweep(make("sweep", "one load after the other on such a server, each at a higher rate"))
    latency = make("latency", "how long a batch takes, in an engine of this process")
    throughput = make("throughput", "tokens a second, in an engine of this process")
    for command in (latency, throughput):
        add_store(command)
        add_model(command)
        _add_sizes(command)
        _add_json(command)
    latency.add_argument("--batch-size", type=positive, default=1, metavar="N", help="of prompts")
    latency.add_argument("--repeats", type=positive, default=5, metavar="N", help="measured")
    throughput.add_argument("--requests", type=positive, default=100, metavar="N", help="in all")
    add_offline_engine(latency)
    add_offline_engine(throughput)


def add_serve(serve: Parser) -> None:
    _add_load(serve)
    serve.add_argument(
        "--request-rate",
        type=amount,
        metavar="R",
        help="requests a second, arriving as a Poisson process; unset: all at once",
    )
    serve.add_argument(
        "--max-concurrency",
        type=positive,
        metavar="C",
        help="requests on their way at once; without a rate: so many clients, one request each "
        "at a time",
    )
    serve.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.jsonl",
        help="requests with at (seconds), prompt_tokens and output_tokens instead",
    )


def add_sweep(sweep: Parser) -> None:
    _add_load(sweep)
    sweep.add_argument(
        "--request-rates", type=rates, required=True, metavar="R,R,...", help="to measure at"
    )
    sweep.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="draw what is answered by what is offered"
    )


def _add_load(command: Parser) -> None:
    add_url(command, required=True)
    command.add_argument("--model", metavar="NAME", help="unset: the first one served")
    command.add_argument(
        "--endpoint", choices=("chat", "completions"), default="completions", help="to ask"
    )
    command.add_argument("--requests", type=positive, default=100, metavar="N", help="of each load")
    command.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt a line, or .jsonl with a prompt each; unset: random words",
    )
    _add_sizes(command)
    command.add_argument(
        "--ignore-eos",
        action="store_true",
        help="answers have exactly --output-tokens (servers that know the parameter)",
    )
    command.add_argument(
        "--goodput",
        type=limits,
        default={},
        metavar="NAME:MS,...",
        help=f"count the requests with such latencies, of {', '.join(LATENCIES)}: ttft:500,tpot:33",
    )
    _add_json(command)


def _add_sizes(command: Parser) -> None:
    command.add_argument(
        "--prompt-tokens", type=positive, default=128, metavar="N", help="of random prompts"
    )
    command.add_argument(
        "--output-tokens", type=positive, default=128, metavar="N", help="of an answer, at most"
    )
    command.add_argument("--seed", type=natural, default=0, metavar="N", help="of all randomness")


def _add_json(command: Parser) -> None:
    command.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def rates(text: str) -> tuple[float, ...]:
    """Requests a second, several of them."""
    return tuple(amount(part) for part in text.split(","))


def limits(text: str) -> dict[str, float]:
    """Milliseconds by the name of a latency."""
    found = {}
    for part in text.split(","):
        name, _, limit = part.partition(":")
        if name not in LATENCIES:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not one of {', '.join(LATENCIES)} with a limit, such as ttft:500"
            )
        found[name] = amount(limit)
    return found
