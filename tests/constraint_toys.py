"""Constraints for the tiny models: a vocabulary of theirs, schemas, and what satisfies them."""

from __future__ import annotations

import functools
import json
from typing import Any

from engines import request
from text_toys import EOS, byte_level, spec_of

from jaxserve.engine import Engine
from jaxserve.grammar import Grammars
from jaxserve.request import Constraint, Request
from jaxserve.tokenizer import Tokenizer

VOCAB = 320  # of the tiny models; the vocabulary has fewer tokens
EOS_ID = byte_level().token_to_id(EOS)
SECOND_EOS_ID = byte_level().token_to_id("<pad>")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog", 3, None]},
        "age": {"type": "integer", "minimum": 3, "maximum": 40},
        "marks": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"city": {"const": "Ys"}, "old": {"type": "boolean"}},
            "required": ["city", "old"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "age", "marks", "home"],
    "additionalProperties": False,
}


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(spec_of(byte_level()), vocab_size=VOCAB)


@functools.cache
def grammars() -> Grammars:
    return Grammars(byte_level().to_str(), vocab_size=VOCAB, eos_ids=(EOS_ID, SECOND_EOS_ID))


def schema(given: dict[str, Any], whitespace: str | None = None) -> Constraint:
    return Constraint("json_schema", json.dumps(given), whitespace)


def constrained(
    name: str, constraint: Constraint, max_tokens: int = 450, seed: int = 0, **sampling: Any
) -> Request:
    """A request at temperature 1 unless told otherwise."""
    fields = {"temperature": 1.0, "stop_token_ids": (EOS_ID, SECOND_EOS_ID)} | sampling
    return request(name, [1, 2, 3], max_tokens, seed=seed, constraint=constraint, **fields)


def add(engine: Engine, *requests: Request) -> None:
    """Queue them, each with a matcher if it has a constraint."""
    for each in requests:
        constraint = each.sampling.constraint
        matcher = None if constraint is None else grammars().matcher(constraint)
        engine.add(each, matcher=matcher)


def text(ids: list[int]) -> str:
    return tokenizer().decode(ids)
