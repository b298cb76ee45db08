"""What every command can be told: the arguments and their types. Decides nothing."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import DEFAULT_MODEL, default_store_path
from jaxserve.config import EngineConfig, ServerConfig

Parser = argparse.ArgumentParser
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:]+\])(:\d{1,5})?")


def add_store(command: Parser) -> None:
    command.add_argument(
        "--store",
        type=Path,
        default=default_store_path(),
        help="folder of converted models and compiled steps",
    )


def add_config(command: Parser) -> None:
    command.add_argument(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="defaults for the flags below, a line 'flag = value' each",
    )


def add_model(command: Parser) -> None:
    command.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help="name, path or hf:org/name"
    )


def add_http(serve: Parser) -> None:
    http = serve.add_argument_group("HTTP")
    http.add_argument("--host", default=default(ServerConfig, "host"), help="address to listen on")
    http.add_argument(
        "--port", type=port, default=default(ServerConfig, "port"), help="0 picks a free one"
    )
    http.add_argument(
        "--uds", type=Path, metavar="PATH", help="a Unix socket to listen on, not host and port"
    )
    http.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="speak TLS: certificate")
    http.add_argument(
        "--ssl-keyfile", type=Path, metavar="FILE", help="its key; unset: in the same file"
    )
    http.add_argument("--served-model-name", metavar="NAME", help="the model id clients use")
    http.add_argument(
        "--drain-timeout",
        type=seconds,
        metavar="SECONDS",
        default=default(ServerConfig, "drain_timeout"),
        help="time running requests get to finish after SIGTERM",
    )
    http.add_argument(
        "--max-pending",
        type=positive,
        metavar="N",
        default=default(ServerConfig, "max_pending"),
        help="most sequences accepted and unfinished; more get 429",
    )
    http.add_argument(
        "--max-body-bytes",
        type=positive,
        metavar="N",
        default=default(ServerConfig, "max_body_bytes"),
        help="larger request bodies get 413",
    )
    http.add_argument(
        "--heartbeat-timeout",
        type=seconds,
        metavar="SECONDS",
        default=default(ServerConfig, "heartbeat_timeout"),
        help="silence after which the engine counts as hanging and is restarted",
    )
    http.add_argument(
        "--pooling",
        choices=("last", "mean"),
        default=default(ServerConfig, "pooling"),
        help="what an embedding is made of: the last token's hidden state, or the mean of all",
    )
    http.add_argument(
        "--batch-dir",
        type=Path,
        metavar="DIR",
        help="folder of uploaded files and batches; unset: one for each model in the store",
    )
    http.add_argument(
        "--batch-concurrency",
        type=positive,
        metavar="N",
        default=default(ServerConfig, "batch_concurrency"),
        help="most lines of batches at work at once",
    )
    http.add_argument(
        "--shared-cache",
        action="store_true",
        help="requests of different API keys share computed prompts too",
    )
    http.add_argument(
        "--tool-parser",
        choices=("auto", "hermes", "llama3", "mistral", "none"),
        default=default(ServerConfig, "tool_parser"),
        help="how the model writes calls of functions; auto: as its chat template shows it",
    )
    http.add_argument(
        "--reasoning-parser",
        choices=("auto", "think", "none"),
        default=default(ServerConfig, "reasoning_parser"),
        help="think: answers begin with <think>...</think>, which clients get as reasoning; auto: "
        "if the chat template says so",
    )
    http.add_argument("--access-log", action="store_true", help="log a line of JSON a request")
    _add_access(serve)


def _add_access(serve: Parser) -> None:
    access = serve.add_argument_group("who may ask, and how much")
    access.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="lines of 'name: key', read again on SIGHUP; a key in the environment's "
        "JAXSERVE_API_KEY counts too; unset: everybody may ask",
    )
    access.add_argument(
        "--metrics-need-key",
        action="store_true",
        help="/metrics is not open to all, as /health and /version are",
    )
    access.add_argument(
        "--requests-per-minute", type=positive, metavar="N", help="most of each API key"
    )
    access.add_argument(
        "--tokens-per-minute",
        type=positive,
        metavar="N",
        help="most of each API key, prompts and output together",
    )
    access.add_argument(
        "--allow-origin",
        type=origins,
        metavar="ORIGIN,ORIGIN,...",
        default=default(ServerConfig, "allow_origin"),
        help="web pages that may ask from a browser, such as https://chat.example.org; *: any",
    )


def add_engine(serve: Parser) -> None:
    engine = serve.add_argument_group("engine")
    engine.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and activations; unset: float32 on CPU, bfloat16 on GPU",
    )
    engine.add_argument(
        "--attention",
        choices=("auto", "triton", "mosaic", "native", "cpu", "reference"),
        default=default(EngineConfig, "attention"),
        help="kernels; auto: triton on NVIDIA GPUs from compute capability 8.0; on a CPU native, "
        "which is C++, where a compiler is installed; cpu, plain jnp, elsewhere",
    )
    engine.add_argument(
        "--max-rows",
        type=positive,
        metavar="R",
        default=default(EngineConfig, "max_rows"),
        help="most sequences running at once; unset: 64 on a CPU, 256 on a GPU",
    )
    engine.add_argument(
        "--token-budget",
        type=positive,
        metavar="T",
        default=default(EngineConfig, "token_budget"),
        help="most tokens in a step, prefill and decode together; unset: 256 or 1024",
    )
    engine.add_argument(
        "--max-context",
        type=positive,
        metavar="TOKENS",
        help="most tokens of a sequence, prompt and output; unset: the model's own limit",
    )
    engine.add_argument(
        "--step", metavar="MODULE:FACTORY", help="a step function of your own; see examples/"
    )
    engine.add_argument(
        "--executables",
        type=Path,
        metavar="DIR",
        help="steps that `jaxserve compile --save DIR` compiled for this card; unset: compile here",
    )
    _add_weights(engine)
    _add_cache(engine)
    _add_promise(serve)


def _add_promise(serve: Parser) -> None:
    promise = serve.add_argument_group("the promise: what is admitted is answered in time")
    unset = "unset: %s ms on a GPU, no promise on a CPU"
    promise.add_argument(
        "--ttft-ms", type=amount, metavar="MS", help=f"time to first token; {unset % 500}"
    )
    promise.add_argument(
        "--tpot-ms",
        type=amount,
        metavar="MS",
        help=f"time per token after it, a request's mean; {unset % 33}",
    )
    promise.add_argument(
        "--percentile",
        type=amount,
        metavar="P",
        default=default(EngineConfig, "percentile"),
        help="of the requests that keep each of the two",
    )
    promise.add_argument("--no-promise", action="store_true", help="on a GPU: promise nothing")
    promise.add_argument(
        "--max-tokens-cap", type=positive, metavar="N", help="most tokens of an answer"
    )
    promise.add_argument(
        "--max-queue",
        type=positive,
        metavar="N",
        default=default(EngineConfig, "max_queue"),
        help="most sequences that wait; more get 429",
    )


def add_kv(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv",
        choices=("auto", "int8"),
        default=default(EngineConfig, "kv"),
        help="type of cached keys and values; auto: that of the weights",
    )


def _add_weights(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument(
        "--weights",
        choices=("auto", "int8"),
        default=default(EngineConfig, "weights"),
        help="type of the weights' matrices; auto: that of --dtype; int8: on a CPU only",
    )


def _add_cache(engine: argparse._ArgumentGroup) -> None:
    add_kv(engine)
    engine.add_argument(
        "--page-size",
        type=positive,
        metavar="B",
        default=default(EngineConfig, "page_size"),
        help="tokens per cache page",
    )
    engine.add_argument(
        "--num-pages", type=positive, metavar="N", help="pages of cache; unset: what memory allows"
    )
    engine.add_argument(
        "--memory-fraction",
        type=fraction,
        metavar="F",
        help="share of memory to use; unset: 0.9 of a GPU, 0.1 of a CPU machine for the cache",
    )
    engine.add_argument(
        "--no-prefix-reuse",
        dest="prefix_reuse",
        action="store_false",
        help="compute every prompt anew, even one that begins like another",
    )
    engine.add_argument(
        "--swap-space",
        type=gibibytes,
        metavar="GIB",
        default=default(EngineConfig, "swap_space"),
        help="host memory for sequences that lost their pages; 0 recomputes them",
    )


def default(kind: type[Any], name: str) -> Any:
    """The default a config declares for a field: it is written down once, there."""
    return next(field.default for field in dataclasses.fields(kind) if field.name == name)


def settings(kind: type[Any], flags: argparse.Namespace) -> Any:
    """A frozen config of the flags that bear the names of its fields."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in vars(flags).items() if name in names})


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def port(text: str) -> int:
    """A TCP port; 0 asks for a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def origins(text: str) -> tuple[str, ...]:
    """Where web pages come from, as browsers write it."""
    found = tuple(text.split(","))
    for origin in found:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise argparse.ArgumentTypeError(
                f"{origin!r} is not an origin such as https://chat.example.org or "
                "http://127.0.0.1:3000, without a path, nor *"
            )
    return found


def seconds(text: str) -> float:
    """A finite number of seconds, not negative."""
    return _number(text, "a number of seconds, 0 or more", 0.0, math.inf)


def gibibytes(text: str) -> float:
    """A finite amount of memory in GiB, 0 included."""
    return _number(text, "a number of GiB, 0 or more", 0.0, math.inf)


def amount(text: str) -> float:
    """A finite number above 0."""
    return _number(text, "a number above 0", 1e-9, math.inf)


def fraction(text: str) -> float:
    """A share above 0 and up to 1."""
    return _number(text, "a share between 0 and 1", 1e-6, 1.0)


def natural(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def milliseconds(text: str) -> float:
    """A number of milliseconds, in seconds."""
    return _number(text, "a number of milliseconds, 0 or more", 0.0, math.inf) / 1e3


def scaled(unit: float) -> Callable[[str], float]:
    """A type for numbers above 0 that are given in this unit."""

    def number(text: str) -> float:
        return _number(text, "a number above 0", 1e-9, math.inf) * unit

    return number


def _number(text: str, expected: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (low <= value <= high and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value
