"""What the commands that only compute can be told: plan, simulate, compile. Decides nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxserve.aot.target import TARGETS
from jaxserve.cards import CARDS, ITEMSIZE
from jaxserve.config import USUAL_SIZES, EngineConfig
from jaxserve.flags.engine import KV
from jaxserve.flags.settings import Parser, add_settings, default
from jaxserve.flags.types import fraction, milliseconds, natural, positive, scaled
from jaxserve.plan import PLAN_MODELS
from jaxserve.simulate import MIXES, POLICIES
from jaxserve.simulate.policies import MakePolicy
from jaxserve.workload import Workload


def add_plan(plan: Parser) -> None:
    _add_device(plan)
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw step time by batch size")
    _add_promise(plan)
    _add_card(plan)
    _add_arithmetic(plan)


def add_simulate(simulate: Parser) -> None:
    _add_device(simulate)
    simulate.add_argument("--json", action="store_true", help="print JSON instead of tables")
    simulate.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="draw goodput against offered load"
    )
    simulate.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write what most look for as JSON",
    )
    setting = simulate.add_argument_group("the simulation")
    setting.add_argument("--mix", choices=tuple(MIXES), default="reference", help="of requests")
    setting.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests as JSON lines instead"
    )
    setting.add_argument(
        "--requests", type=positive, default=3000, metavar="N", help="of each simulation"
    )
    setting.add_argument(
        "--policies",
        type=policies,
        default=",".join(POLICIES),
        metavar="NAME,NAME,...",
        help="to compare",
    )
    setting.add_argument(
        "--loads",
        type=multiples,
        default="0.5,1,1.5,2,3",
        metavar="X,Y,...",
        help="offered, in multiples of the capacity",
    )
    setting.add_argument(
        "--capacity",
        type=scaled(1.0),
        metavar="REQ/S",
        help="unset: the most that is served within the promise, looked for",
    )
    setting.add_argument("--noise", type=scaled(1.0), metavar="F", help="of step times, relative")
    setting.add_argument("--seed", type=natural, default=1, metavar="N", help="of all randomness")
    _add_promise(simulate)
    _add_card(simulate)
    _add_arithmetic(simulate)


def add_compile(compile: Parser) -> None:
    compile.add_argument(
        "--model",
        default="llama-3.1-8b",
        help=f"{', '.join(PLAN_MODELS)}, or any checkpoint that serve takes",
    )
    compile.add_argument("--gpu", choices=TARGETS, default="a100-80gb", help="card to compile for")
    compile.add_argument("--json", action="store_true", help="print JSON instead of tables")
    compile.add_argument("--out", type=Path, metavar="FILE", help="write JSON here as well")
    compile.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="write executables there, for `serve --executables DIR` on the card",
    )
    server = compile.add_argument_group("the server that is compiled for")
    rows, tokens = USUAL_SIZES["gpu"]
    for name, usual, meaning in (
        ("max_rows", rows, "most sequences running at once"),
        ("token_budget", tokens, "most tokens in a step, prefill and decode together"),
        ("page_size", default(EngineConfig, "page_size"), "tokens per cache page"),
    ):
        server.add_argument(
            "--" + name.replace("_", "-"),
            type=positive,
            metavar="N",
            default=usual,
            help=meaning,
        )
    server.add_argument(
        "--max-context",
        type=positive,
        metavar="TOKENS",
        help="most tokens of a sequence; unset: the model's own limit",
    )
    server.add_argument(
        "--memory-fraction",
        type=fraction,
        default=0.9,
        metavar="F",
        help="share of the card's memory to use",
    )
    server.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of weights and activations",
    )
    add_settings(server, EngineConfig, [KV])
    server.add_argument(
        "--attention", default="auto", metavar="KIND", help="which kernels attend; auto: triton"
    )
    compile.add_argument(
        "--mfu", type=fraction, default=0.5, metavar="F", help="share of the FLOP/s that is reached"
    )


def multiples(text: str) -> tuple[float, ...]:
    """Numbers above 0, with commas between them."""
    return tuple(scaled(1.0)(part) for part in text.split(","))


def policies(text: str) -> dict[str, MakePolicy]:
    """Names of policies, with commas between them."""
    unknown = set(text.split(",")) - set(POLICIES)
    if unknown:
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is not one of {', '.join(POLICIES)}")
    return {name: POLICIES[name] for name in text.split(",")}


def _add_device(command: Parser) -> None:
    command.add_argument(
        "--model",
        default="llama-3.1-8b",
        help=f"{', '.join(PLAN_MODELS)}, or any checkpoint that serve takes",
    )
    command.add_argument("--gpu", default="a100-80gb", help=f"{', '.join(CARDS)} or cpu")


def _add_promise(plan: Parser) -> None:
    ask = plan.add_argument_group("what is asked and promised")
    ask.add_argument(
        "--ttft", type=milliseconds, default="500", metavar="MS", help="time to first token"
    )
    ask.add_argument(
        "--tpot", type=milliseconds, default="33", metavar="MS", help="time per output token"
    )
    for name, meaning in (
        ("prompt_p50", "tokens: half of the prompts are shorter"),
        ("prompt_p95", "tokens: 95%% of the prompts are shorter"),
        ("prompt_max", "tokens of the longest prompt"),
        ("output_p50", "tokens: half of the outputs are shorter"),
        ("output_p95", "tokens: 95%% of the outputs are shorter"),
    ):
        ask.add_argument(
            "--" + name.replace("_", "-"),
            type=positive,
            metavar="N",
            default=default(Workload, name),
            help=meaning,
        )
    ask.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="tokens of a running sequence on average; unset: from the lengths above",
    )
    ask.add_argument(
        "--min-prefill",
        type=natural,
        metavar="N",
        help="prompt tokens every step has room for; unset: as many as keep prompts from piling up",
    )


def _add_card(plan: Parser) -> None:
    card = plan.add_argument_group("the card: measured rates instead of published ones")
    card.add_argument("--memory", type=scaled(1e9), metavar="GB", help="of the card, in all")
    card.add_argument("--bandwidth", type=scaled(1e9), metavar="GB/s", help="of its memory")
    card.add_argument("--flops", type=scaled(1e12), metavar="TFLOP/s", help="at the weights' type")
    card.add_argument(
        "--mfu", type=fraction, default=0.5, metavar="F", help="share of the FLOP/s that is reached"
    )
    card.add_argument(
        "--overhead", type=milliseconds, default="0", metavar="MS", help="of every step"
    )
    card.add_argument(
        "--memory-fraction",
        type=fraction,
        default=0.9,
        metavar="F",
        help="share of the memory to use",
    )
    card.add_argument(
        "--kv-memory", type=scaled(1e9), metavar="GB", help="of cache; unset: what weights leave"
    )


def _add_arithmetic(plan: Parser) -> None:
    sums = plan.add_argument_group("the arithmetic")
    unset = "unset: bfloat16, float32 on cpu"
    sums.add_argument("--weights", choices=tuple(ITEMSIZE), help=f"type of the weights; {unset}")
    sums.add_argument("--kv", choices=tuple(ITEMSIZE), help=f"type of the cache; {unset}")
    sums.add_argument(
        "--weights-only",
        action="store_true",
        help="the textbook's picture: steps read every weight, and no keys and values",
    )
