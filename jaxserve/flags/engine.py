"""What an engine can be told, and what it promises."""

from __future__ import annotations

from pathlib import Path

from jaxserve.config import EngineConfig
from jaxserve.flags.settings import Parser, Setting, add_settings
from jaxserve.flags.types import amount, fraction, gibibytes, positive

KV = Setting("--kv", ("auto", "int8"), "type of cached keys and values; auto: that of the weights")
ENGINE = (
    Setting(
        "--dtype",
        ("float32", "bfloat16", "float16"),
        "of weights and activations; unset: float32 on CPU, bfloat16 on GPU",
    ),
    Setting(
        "--attention",
        ("auto", "triton", "mosaic", "native", "cpu", "reference"),
        "kernels; auto: triton on NVIDIA GPUs from compute capability 8.0; on a CPU native, "
        "which is C++, where a compiler is installed; cpu, plain jnp, elsewhere",
    ),
    Setting(
        "--max-rows",
        positive,
        "most sequences running at once; unset: 64 on a CPU, 256 on a GPU",
        "R",
    ),
    Setting(
        "--token-budget",
        positive,
        "most tokens in a step, prefill and decode together; unset: 256 or 1024",
        "T",
    ),
    Setting(
        "--max-context",
        positive,
        "most tokens of a sequence, prompt and output; unset: the model's own limit",
        "TOKENS",
    ),
    Setting("--step", str, "a step function of your own; see examples/", "MODULE:FACTORY"),
    Setting(
        "--executables",
        Path,
        "steps that `jaxserve compile --save DIR` compiled for this card; unset: compile here",
        "DIR",
    ),
    Setting(
        "--weights",
        ("auto", "int8"),
        "type of the weights' matrices; auto: that of --dtype; int8: on a CPU only",
    ),
    KV,
    Setting("--page-size", positive, "tokens per cache page", "B"),
    Setting("--num-pages", positive, "pages of cache; unset: what memory allows", "N"),
    Setting(
        "--memory-fraction",
        fraction,
        "share of memory to use; unset: 0.9 of a GPU, 0.1 of a CPU machine for the cache",
        "F",
    ),
    Setting(
        "--no-prefix-reuse",
        None,
        "compute every prompt anew, even one that begins like another",
        field="prefix_reuse",
    ),
    Setting(
        "--swap-space",
        gibibytes,
        "host memory for sequences that lost their pages; 0 recomputes them",
        "GIB",
    ),
)
_UNSET = "unset: %s ms on a GPU, no promise on a CPU"
PROMISE = (
    Setting("--ttft-ms", amount, f"time to first token; {_UNSET % 500}", "MS"),
    Setting("--tpot-ms", amount, f"time per token after it, a request's mean; {_UNSET % 33}", "MS"),
    Setting("--percentile", amount, "of the requests that keep each of the two", "P"),
    Setting("--no-promise", None, "on a GPU: promise nothing"),
    Setting("--max-tokens-cap", positive, "most tokens of an answer", "N"),
    Setting("--max-queue", positive, "most sequences that wait; more get 429", "N"),
)


def add_engine(serve: Parser) -> None:
    add_settings(serve.add_argument_group("engine"), EngineConfig, ENGINE)
    promise = serve.add_argument_group("the promise: what is admitted is answered in time")
    add_settings(promise, EngineConfig, PROMISE)
