"""Requests that come: when, how long, and what their prompts have in common."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.request import Request, SamplingParams, ServiceClass
from jaxserve.workload import Workload

LONGEST_OUTPUT = 8
"""Times the 95th percentile: outputs longer than that are cut off."""
_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)


@dataclass(frozen=True, slots=True)
class Mix:
    """What requests look like.

    Attributes:
        name: for people.
        workload: lengths of prompts, without `shared`, and of outputs.
        shared: tokens that all prompts begin with.
        documents: if not 0, every prompt is one of so many documents and `question` tokens; the
            documents have the workload's prompt lengths.
        question: tokens.
    """

    name: str
    workload: Workload = field(default_factory=Workload)
    shared: int = 0
    documents: int = 0
    question: int = 0


REFERENCE = Mix("reference")
MIXES: Mapping[str, Mix] = {
    mix.name: mix
    for mix in (
        REFERENCE,
        Mix("shared-prompt", shared=2000),
        Mix("decode-heavy", documents=100, question=32),
    )
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and the second it comes."""

    at: float
    request: Request


def poisson(mix: Mix, count: int, rate: float, seed: int) -> list[Arrival]:
    """Requests that come independently of each other.

    Lengths are spread evenly over the quantiles of their distribution and then shuffled, and the
    times scaled to the rate: `count` requests have the exact percentiles and the exact rate.

    Args:
        mix: what they look like.
        count: how many.
        rate: requests a second.
        seed: of everything random.
    """
    draw = random.Random(seed)
    times = [draw.expovariate(1.0) for _ in range(count)]
    scale = count / rate / sum(times)
    outputs = _lengths(draw, count, *_outputs(mix.workload))
    prompts = _prompts(draw, mix, count)
    arrivals = []
    now = 0.0
    for index, (gap, prompt, output) in enumerate(zip(times, prompts, outputs, strict=True)):
        now += gap * scale
        arrivals.append(Arrival(now, Request(f"r{index}", prompt, SamplingParams(output))))
    return arrivals


def read_trace(file: Path, rate: float | None = None) -> list[Arrival]:
    """Requests from a file of JSON lines with `at` (seconds), `prompt_tokens`, `output_tokens` and,
    where wanted, `tenant` and `service_class`. In order of `at`; scaled to a rate if one is given.

    Raises ConfigError for a file that cannot be read as that.
    """
    try:
        lines = msgspec.json.Decoder(_Line).decode_lines(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read the trace {file}: {error}") from error
    if not lines:
        raise ConfigError(f"the trace {file} is empty")
    lines.sort(key=lambda line: line.at)
    scale = 1.0 if rate is None else len(lines) / rate / lines[-1].at
    return [
        Arrival(
            line.at * scale,
            Request(
                f"r{index}",
                (index,) * line.prompt_tokens,
                SamplingParams(line.output_tokens),
                service_class=line.service_class,
                tenant=line.tenant,
            ),
        )
        for index, line in enumerate(lines)
    ]


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    at: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    service_class: ServiceClass = "interactive"


def _prompts(draw: random.Random, mix: Mix, count: int) -> list[tuple[int, ...]]:
    """Prompts whose tokens, numbers above `count`, tell what they share."""
    work = mix.workload
    lengths = (work.prompt_p50, work.prompt_p95, work.prompt_max)
    if mix.documents:
        documents = [
            (count + index,) * length
            for index, length in enumerate(_lengths(draw, mix.documents, *lengths))
        ]
        return [
            documents[draw.randrange(mix.documents)] + (index,) * mix.question
            for index in range(count)
        ]
    shared = (count,) * mix.shared
    return [
        shared + (index,) * length for index, length in enumerate(_lengths(draw, count, *lengths))
    ]


def _outputs(work: Workload) -> tuple[int, int, int]:
    return work.output_p50, work.output_p95, LONGEST_OUTPUT * work.output_p95


def _lengths(draw: random.Random, count: int, p50: int, p95: int, longest: int) -> list[int]:
    """`count` lengths of a log-normal distribution through its percentiles, cut off."""
    sigma = math.log(p95 / p50) / _Z95
    places = (_NORMAL.inv_cdf((index + 0.5) / count) for index in range(count))
    lengths = [max(1, min(longest, round(p50 * math.exp(sigma * z)))) for z in places]
    draw.shuffle(lengths)
    return lengths
