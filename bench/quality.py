"""What a setting costs in quality: the log-probability that a model gives to a text.

    python -m bench.quality smollm2-135m-instruct --kv auto int8 --weights auto int8

The text is cut into windows of --context tokens. Each is computed from nothing, in chunks, through
the paged cache, as a server computes prompts; every token after a window's first is predicted. The
first setting is what the others are compared with, token by token.
"""

from __future__ import annotations

import argparse
import importlib
import math
import platform
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.measure import Point, at_least, machine_facts, rounded, write_point
from checkpoints import (
    DEFAULT_MODEL,
    Checkpoint,
    CheckpointError,
    Store,
    default_store_path,
    open_checkpoint,
)
from jaxserve.aot.target import settle_for_cpu
from jaxserve.batch import BatchDescriptor, LayerPages, PageTable, StepShape
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.models.attention import cache_dtype, choose_attention, empty_pages
from jaxserve.models.decoder import Decoder
from jaxserve.models.llama import Params
from jaxserve.models.packed import pack_params
from jaxserve.packing import pack
from jaxserve.request import Request, SamplingParams
from jaxserve.sequence import Sequence as Row
from jaxserve.sequence import Span
from jaxserve.startup import packs_weights, resolve_dtype
from jaxserve.tokenizer import Tokenizer

PAGE_SIZE = 16
CHUNK = 256
"""Tokens a step, as a CPU serves unless told otherwise."""
TEXT = "pydoc_data.topics"
"""A module of Python's standard library: the language reference, by topic."""


class Scores(NamedTuple):
    """Of each predicted token. logprobs: f32, natural. likeliest: i32, what was expected most."""

    logprobs: np.ndarray
    likeliest: np.ndarray


@dataclass(frozen=True)
class Scorer:
    """A model with one setting.

    Attributes:
        decoder, params: the model. kv_dtype: of its cache.
        context: tokens of a window. chunk: tokens of a step.
    """

    decoder: Decoder
    params: Params
    kv_dtype: jnp.dtype
    context: int
    chunk: int = CHUNK

    def score(self, tokens: Sequence[int]) -> Scores:
        """Of the tokens of as many whole windows as there are, but for each one's first."""
        max_pages = -(-self.context // PAGE_SIZE)
        shape = StepShape(self.chunk, 1, max_pages, PAGE_SIZE)
        layers = empty_pages(self.decoder.config, max_pages + 1, PAGE_SIZE, self.kv_dtype)
        run = jax.jit(partial(_forward, self.decoder), donate_argnums=1)
        found: list[list[np.ndarray]] = []
        for first in range(0, len(tokens) - self.context + 1, self.context):
            window = array("i", tokens[first : first + self.context])
            request = Request("window", tuple(window), SamplingParams(1))
            row = Row(request, window, array("i", range(1, max_pages + 1)), slot=0)
            targets = np.zeros(self.context + self.chunk, np.int32)
            targets[: self.context - 1] = window[1:]
            for start in range(0, self.context, self.chunk):
                stop = min(start + self.chunk, self.context)
                step = pack([Span(row, start, stop, feed=False, draws=True)], shape)
                target = targets[start : start + self.chunk]
                scores, layers = run(self.params, layers, *step, target)
                # Behind a window's last token there is nothing to predict.
                count = min(stop, self.context - 1) - start
                found.append([np.asarray(score)[:count] for score in scores])
        return Scores(*map(np.concatenate, zip(*found, strict=True)))


def _forward(
    decoder: Decoder,
    params: Params,
    layers: tuple[LayerPages, ...],
    batch: BatchDescriptor,
    page_table: PageTable,
    targets: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], tuple[LayerPages, ...]]:
    """f32[T] log-probabilities of the targets and i32[T], the likeliest ids; and the cache."""
    hidden, layers = decoder.forward(params, layers, batch.token_ids, batch, page_table)
    logprobs = jax.nn.log_softmax(decoder.unembed(params, hidden))
    given = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
    return (given, jnp.argmax(logprobs, axis=-1).astype(jnp.int32)), layers


def compare(scores: Scores, base: Scores) -> Point:
    """Figures of one setting, and how they differ from another's."""
    change = scores.logprobs.astype(np.float64) - base.logprobs
    mean = float(scores.logprobs.mean(dtype=np.float64))
    return {
        "tokens": len(change),
        "mean_logprob": rounded(mean),
        "perplexity": rounded(math.exp(-mean)),
        "logprob_change": rounded(float(change.mean())),
        "logprob_change_stderr": rounded(float(change.std()) / math.sqrt(len(change))),
        "perplexity_ratio": round(math.exp(-float(change.mean())), 5),
        "same_likeliest": rounded(float((scores.likeliest == base.likeliest).mean())),
    }


def read_tokens(checkpoint: Checkpoint, file: Path | None, count: int) -> list[int]:
    """The first tokens of a text file, or of `TEXT`. Raises ConfigError if there are too few."""
    if checkpoint.tokenizer is None:
        raise ConfigError(f"{checkpoint.name} has no tokenizer to read a text with")
    tokenizer = Tokenizer(checkpoint.tokenizer, vocab_size=checkpoint.config.vocab_size)
    if file is None:
        topics: dict[str, str] = importlib.import_module(TEXT).topics
        text = "\n".join(topics[name] for name in sorted(topics))
    else:
        text = file.read_text()
    tokens = tokenizer.encode_prompt(text[: 16 * count])
    if len(tokens) < count:
        raise ConfigError(f"the text has {len(tokens)} tokens, and {count} are asked for")
    return tokens[:count]


def measure(flags: argparse.Namespace) -> list[Point]:
    """One point a setting."""
    settle_for_cpu()
    checkpoint = open_checkpoint(flags.model, Store(flags.store))
    dtype = resolve_dtype(flags.dtype, jax.default_backend())
    decoder = Decoder(checkpoint.config, choose_attention("auto"))
    count = flags.windows * flags.context
    tokens = read_tokens(checkpoint, flags.text, count)
    points: list[Point] = []
    base: Scores | None = None
    for weights, kv in product(flags.weights, flags.kv):
        params: Any = checkpoint.load(dtype=dtype)
        if packs_weights(weights, decoder.attention, dtype):
            tied = checkpoint.config.tied_head
            params = pack_params(params, tied_head=tied, int8=weights == "int8")
        scores = Scorer(decoder, params, cache_dtype(kv, dtype), flags.context).score(tokens)
        base = base or scores
        setting: Point = {
            "bench": "quality",
            "model": str(flags.model),
            "text": str(flags.text or f"{TEXT} of Python {platform.python_version()}"),
            "context": flags.context,
            "windows": flags.windows,
            "dtype": dtype.name,
            "weights": weights,
            "kv": kv,
        }
        points.append(setting | compare(scores, base) | machine_facts())
    return points


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path")
    parser.add_argument("--store", type=Path, default=default_store_path())
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--kv", nargs="+", choices=("auto", "int8"), default=["auto", "int8"])
    parser.add_argument("--weights", nargs="+", choices=("auto", "int8"), default=["auto"])
    parser.add_argument("--text", type=Path, metavar="FILE", help=f"unset: {TEXT}")
    parser.add_argument("--context", type=at_least(2), default=1024, metavar="TOKENS")
    parser.add_argument("--windows", type=at_least(1), default=16, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to FILE too")
    flags = parser.parse_args(argv)
    try:
        points = measure(flags)
    except (JaxserveError, CheckpointError, OSError) as error:
        print(f"bench.quality: {error}", file=sys.stderr)
        return 1
    for point in points:
        write_point(point, sys.stdout, flags.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
