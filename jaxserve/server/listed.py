"""Tokens that a request favours, allows or bans: from the client's words to checked ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxserve.errors import RequestError
from jaxserve.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LISTED_TOKENS,
    MAX_WAITING_STOPS,
    SamplingParams,
)
from jaxserve.server.limits import Limits, within
from jaxserve.server.prompts import check_vocabulary
from jaxserve.server.text import Tokenizer

MAX_BIAS = 100.0


def logit_bias(given: Mapping[str, float] | None, limits: Limits) -> tuple[tuple[int, float], ...]:
    """`logit_bias`: (token id, bias). Raises RequestError for a key that is no id, or too many."""
    check_count("logit_bias", given or {}, MAX_LISTED_TOKENS)
    biases = []
    for key, bias in (given or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise RequestError(
                f"logit_bias has key {key[:40]!r}: keys are token ids, as whole numbers",
                param="logit_bias",
            )
        check_vocabulary([int(key)], "logit_bias", limits.vocab_size, param="logit_bias")
        within("logit_bias", bias, -MAX_BIAS, MAX_BIAS, default=0.0)
        biases.append((int(key), bias))
    return tuple(biases)


def allowed_token_ids(given: list[int] | None, limits: Limits) -> tuple[int, ...] | None:
    """`allowed_token_ids`, each once. Raises RequestError for none, too many, or unknown ones."""
    if given is None:
        return None
    if not given:
        raise RequestError(
            "allowed_token_ids is empty, which allows nothing: leave it out to allow all",
            param="allowed_token_ids",
        )
    check_count("allowed_token_ids", given, MAX_LISTED_TOKENS)
    check_vocabulary(given, "allowed_token_ids", limits.vocab_size, param="allowed_token_ids")
    return tuple(dict.fromkeys(given))


def bad_words(given: list[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """`bad_words` as tokens, each as it is at the start of a text and after a space.

    Raises RequestError for an empty word, a long one, or too many.
    """
    check_count("bad_words", given or [], MAX_BAD_WORDS)
    found: dict[tuple[int, ...], None] = {}
    for word in given or ():
        bare = word.lstrip(" ")
        if not bare:
            raise RequestError(f"bad_words has an empty word, {word!r}", param="bad_words")
        for text in (bare, " " + bare):
            ids = tuple(tokenizer.encode(text, param="bad_words"))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words has {word[:40]!r} of {len(ids)} tokens; at most "
                    f"{MAX_BAD_WORD_TOKENS} are allowed",
                    param="bad_words",
                )
            found[ids] = None
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words are {len(found)} different sequences of tokens, with and without a space "
            f"in front; at most {MAX_BAD_WORDS} are allowed",
            param="bad_words",
        )
    return tuple(found)


def check_count(name: str, given: Sequence[object] | Mapping[str, object], most: int) -> None:
    """RequestError for more than `most` entries."""
    if len(given) > most:
        raise RequestError(
            f"{name} has {len(given)} entries; at most {most} are allowed", param=name
        )


def check_listed(sampling: SamplingParams) -> None:
    """RequestError for settings that would leave no token to draw, or more stops than can wait."""
    stops = sampling.stop_token_ids
    if sampling.min_tokens and len(stops) > MAX_WAITING_STOPS:
        raise RequestError(
            f"stop_token_ids and the model's own are {len(stops)} tokens; with min_tokens at most "
            f"{MAX_WAITING_STOPS} are allowed",
            param="stop_token_ids",
        )
    if sampling.allowed_token_ids is None:
        return
    rules = sampling.listed_tokens().values()
    if all(bias < -MAX_BIAS for bias, _ in rules):
        raise RequestError(
            "bad_words bans every one of allowed_token_ids", param="allowed_token_ids"
        )
    if all(bias < -MAX_BIAS or waits for bias, waits in rules):
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, and until then nothing is left of "
            "allowed_token_ids: all end the answer",
            param="min_tokens",
        )
