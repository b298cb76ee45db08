"""What one server can take, and the check every number of a request goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from jaxserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class Limits:
    """What this server can serve.

    Attributes:
        vocab_size: token ids are in [0, vocab_size).
        max_context: most tokens, prompt and output together, of one sequence.
        max_sequences: most sequences one request may ask for.
        eos_ids: tokens that end a generation.
        shared_cache: callers share computed prompts.
    """

    vocab_size: int
    max_context: int
    max_sequences: int
    eos_ids: tuple[int, ...]
    shared_cache: bool = False


MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512


def checked_metadata(given: dict[str, str] | None) -> dict[str, str] | None:
    """`metadata`. RequestError for too much of it."""
    for key, value in (given or {}).items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise RequestError(
                f"metadata has a key of {len(key)} characters and a value of {len(value)}; at most "
                f"{MAX_METADATA_KEY} and {MAX_METADATA_VALUE} are allowed",
                param="metadata",
            )
    if given is not None and len(given) > MAX_METADATA:
        raise RequestError(
            f"metadata has {len(given)} entries; at most {MAX_METADATA} are allowed",
            param="metadata",
        )
    return given


Number = TypeVar("Number", int, float)


def within(
    name: str, value: Number | None, low: Number, high: Number, *, default: Number
) -> Number:
    """The value, or the default for None. RequestError outside [low, high]."""
    if value is None:
        return default
    if not low <= value <= high:
        bound = f"between {low:g} and {high:g}" if high < 1e9 else f"at least {low:g}"
        raise RequestError(f"{name} is {value}: it must be {bound}", param=name)
    return value
