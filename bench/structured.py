"""Answers held to a schema: whether they keep to it, and what that costs. The engine alone.

python -m bench.structured MODEL --answers 200 --concurrency 16

First `--answers` answers at temperature 1 to a schema with objects within objects, each parsed and
validated by the `jsonschema` package. Then `--concurrency` streams of `--output-tokens` tokens at
temperature 1, with a schema that leaves them no end before that and without one, by turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jsonschema
from rich.console import Console

from bench.measure import (
    BenchError,
    Point,
    add_flags,
    engine_flags,
    facts,
    random_prompts,
    rounded,
    write_point,
)
from bench.program import exit_code
from checkpoints import Store, open_checkpoint
from jaxserve.config import EngineConfig
from jaxserve.request import Constraint, Request, SamplingParams
from jaxserve.startup import LoadedEngine, load_engine
from jaxserve.terminal import ProgressBar
from jaxserve.tokenizer import Tokenizer

ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1, "maximum": 99999},
        "customer": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 30},
                "email": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.(com|org)$"},
                "level": {"enum": ["bronze", "silver", "gold", None]},
            },
            "required": ["name", "email", "level"],
            "additionalProperties": False,
        },
        "lines": {
            "type": "array",
            "minItems": 1,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "product": {"type": "string", "maxLength": 20},
                    "price": {"type": "number", "minimum": 0, "maximum": 1000},
                    "gift": {"type": "boolean"},
                },
                "required": ["product", "price"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "customer", "lines"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "minItems": 10_000, "items": ORDER}
PROMPT = "An order of a shop, as JSON:\n"


def run(
    loaded: LoadedEngine, requests: Sequence[Request], concurrency: int
) -> tuple[dict[str, list[int]], float, float]:
    """Serve the requests, so many at a time. Their tokens, seconds in all, seconds compiling."""
    engine, waiting = loaded.engine, deque(requests)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    running, compiling, started = 0, 0.0, time.perf_counter()
    while waiting or engine.has_work:
        while waiting and running < concurrency:
            request = waiting.popleft()
            constraint = request.sampling.constraint
            began = time.perf_counter()
            matcher = None if constraint is None else loaded.grammars.matcher(constraint)
            compiling += time.perf_counter() - began
            engine.add(request, matcher=matcher)
            running += 1
        for event in engine.step():
            if event.finish_reason == "error":
                raise BenchError(f"a request failed: {event.message}")
            if event.token_id is not None:
                tokens[event.request_id].append(event.token_id)
            running -= event.finish_reason is not None
    return tokens, time.perf_counter() - started, compiling


def validate(loaded: LoadedEngine, flags: argparse.Namespace) -> Point:
    """How many answers are what the schema says."""
    checkpoint = open_checkpoint(flags.model, Store(flags.store))
    if checkpoint.tokenizer is None:
        raise BenchError("the model has no tokenizer")
    tokenizer = Tokenizer(checkpoint.tokenizer, vocab_size=loaded.vocab_size)
    prompt = tuple(tokenizer.encode_prompt(PROMPT))
    ends = checkpoint.config.eos_ids
    sampling = SamplingParams(
        512,
        temperature=1.0,
        stop_token_ids=ends,
        constraint=Constraint("json_schema", json.dumps(ORDER)),
    )
    asked = [
        Request(str(i), prompt, replace(sampling, seed=flags.seed + i))
        for i in range(flags.answers)
    ]
    tokens, _, compiling = run(loaded, asked, flags.concurrency[0])
    texts = [tokenizer.decode(ids[:-1]) for ids in tokens.values() if ids[-1] in ends]
    valid = sum(is_valid(text) for text in texts)
    return {
        "answers": len(asked),
        "ended": len(texts),
        "valid": valid,
        "different": len(set(texts)),
        "tokens_per_answer": rounded(statistics.mean(map(len, tokens.values()))),
        "compile_ms": rounded(compiling * 1e3 / len(asked)),
    }


def is_valid(text: str) -> bool:
    """Whether the text is JSON and satisfies the schema."""
    try:
        jsonschema.validate(json.loads(text), ORDER)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def compare(loaded: LoadedEngine, flags: argparse.Namespace, concurrency: int) -> Point:
    """Tokens a second with and without a schema, in rounds by turns."""
    schema = Constraint("json_schema", json.dumps(ENDLESS))
    prompts = random_prompts(concurrency, flags.prompt_tokens, loaded.vocab_size, flags.seed)
    seconds: dict[Constraint | None, list[float]] = {None: [], schema: []}
    for number in range(flags.repeats + 1):
        for constraint, took in seconds.items():
            sampling = SamplingParams(flags.output_tokens, temperature=1.0, constraint=constraint)
            requests = [
                Request(str(i), tuple(prompt), replace(sampling, seed=i))
                for i, prompt in enumerate(next(prompts))
            ]
            _, elapsed, _ = run(loaded, requests, concurrency)
            if number:  # the first round warms up
                took.append(elapsed)
    count = concurrency * flags.output_tokens
    free, held = (rounded(count / statistics.median(took)) for took in seconds.values())
    return {
        **facts("structured", flags, concurrency),
        "engine": loaded.description,
        "device": jax.devices()[0].device_kind,
        "free_tokens_per_s": free,
        "constrained_tokens_per_s": held,
        "ratio": rounded(held / free),
    }


def measure(flags: argparse.Namespace) -> None:
    """Measure and write."""
    settings: dict[str, Any] = engine_flags(flags)
    config = EngineConfig(flags.model, flags.store, **settings)
    with ProgressBar(Console(stderr=True)) as progress:
        loaded = load_engine(config, progress=progress.update)
    for concurrency in flags.concurrency:
        write_point(compare(loaded, flags, concurrency), sys.stdout, flags.json)
    if flags.answers:
        write_point(validate(loaded, flags), sys.stdout, flags.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Lines of JSON go to stdout, everything for people to stderr."""
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__)
    add_flags(parser)
    parser.set_defaults(concurrency=[16], output_tokens=64)
    parser.add_argument("--answers", type=int, default=200, help="to validate; 0 skips that")
    flags = parser.parse_args(argv)
    return exit_code(partial(measure, flags))


if __name__ == "__main__":
    sys.exit(main())
