"""What to ask a server, and when: random or given prompts, Poisson arrivals, or a trace."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import msgspec

from jaxserve.errors import ConfigError

COMMON = (
    "the of and to in is that for it was on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find"
)
"""Short words, a token each for most vocabularies."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `at`: seconds after the first one when it is due."""

    at: float
    prompt: str
    max_tokens: int


class TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace: when, and how much."""

    at: float
    prompt_tokens: int
    output_tokens: int


def random_prompt(rng: random.Random, num_tokens: int) -> str:
    """About so many tokens of nonsense. No two are alike, so that nothing can be reused."""
    return " ".join(rng.choices(COMMON.split(), k=num_tokens))


def prompts_of(file: Path) -> list[str]:
    """The prompts of a file: JSON lines with a `prompt`, or a prompt a line.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
        if file.suffix == ".jsonl":
            lines = [str(json.loads(line)["prompt"]) for line in lines]
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{file} has a line that is not {{"prompt": "..."}}: {error}') from error
    if not lines:
        raise ConfigError(f"{file} has no prompts")
    return lines


def make_load(
    number: int,
    *,
    rate: float | None,
    prompts: Path | None,
    prompt_tokens: int,
    output_tokens: int,
    seed: int,
) -> list[Ask]:
    """So many requests.

    Args:
        rate: requests a second, that come as a Poisson process does; None: all are due at once.
        prompts: a file of them, gone round as often as it takes; None makes random ones.
        prompt_tokens: of random prompts, about. output_tokens: of every answer, at most.
        seed: of prompts and arrivals.
    """
    rng = random.Random(seed)
    given: Iterator[str] | None = None if prompts is None else cycle(prompts_of(prompts))
    at, asks = 0.0, []
    for _ in range(number):
        prompt = random_prompt(rng, prompt_tokens) if given is None else next(given)
        asks.append(Ask(at, prompt, output_tokens))
        at += 0.0 if rate is None else rng.expovariate(rate)
    return asks


def read_trace(file: Path, seed: int) -> list[Ask]:
    """The requests of a trace: JSON lines with `at`, `prompt_tokens` and `output_tokens`.

    Raises:
        ConfigError: it cannot be read as that.
    """
    try:
        lines = msgspec.json.Decoder(TraceLine).decode_lines(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read the trace {file}: {error}") from error
    if not lines:
        raise ConfigError(f"the trace {file} is empty")
    rng = random.Random(seed)
    lines.sort(key=lambda line: line.at)
    return [
        Ask(
            line.at - lines[0].at,
            random_prompt(rng, max(1, line.prompt_tokens)),
            max(1, line.output_tokens),
        )
        for line in lines
    ]
