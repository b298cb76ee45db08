"""Constraints on answers, compiled for one tokenizer. Knows no requests and no arrays.

A compiled constraint is a matcher (llguidance's): it says which tokens may come next, and is told
which one came. Schemas and grammars come from strangers, so everything about them has a limit: a
matcher that reaches one fails, and harms nobody else.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from jaxserve.errors import RequestError
from jaxserve.request import Constraint

LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,  # 20,000 words to choose from, half a second for the worst
    step_lexer_fuel=50_000,  # about 4 ms of a step
    step_max_items=50_000,  # about 3 ms of a step
    max_lexer_states=20_000,  # about 40 MB
    verbose_errors=False,
)
MAX_MEMBERS = 1000
"""Of one object in a schema: compiling takes the square of the number of properties."""
PROBED, PROBE_SECONDS = 3, 0.01
"""Steps that are tried before a constraint is let in, and the CPU time that one of them may take,
but for the first, which makes what others use."""
WHITESPACE = r"[ \t\n\r]{1,32}"
"""Between tokens of JSON, unless the client says otherwise: a line break and an indentation. Small
models left free to go on with it may never come back."""
KEPT = 64
"""Compiled constraints that are kept for whoever asks for the same."""
MAX_MESSAGE = 300
NAMES = {"json_schema": "the schema", "regex": "the regular expression", "lark": "the grammar"}


class Grammars:
    """Makes matchers. Threads may share it: compiling releases the GIL."""

    def __init__(
        self, tokenizer_json: str | None, *, vocab_size: int, eos_ids: tuple[int, ...]
    ) -> None:
        """Args:
        tokenizer_json: as the checkpoint gives it; None if it has none. Read on first use.
        vocab_size: V of the logits, perhaps more than the tokenizer has.
        eos_ids: what an answer ends with.
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """A matcher that has seen nothing yet.

        Raises:
            RequestError: the constraint is malformed, uses what is not supported, is too large or
                matches nothing; or the model's tokenizer is missing or of no use for this.
        """
        with self._lock:
            template = self._compiled.get(constraint)
            if template is not None:
                self._compiled.move_to_end(constraint)
            tokenizer = self._tokenizer
        if template is None:
            template = compile_constraint(constraint, tokenizer)
            with self._lock:
                self._compiled[constraint] = template
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
        return template.deep_copy()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        if self._tokenizer_json is None:
            raise RequestError("this model has no tokenizer: its answers cannot be constrained")
        if not self._eos_ids:
            raise RequestError("this model has no end token: its answers cannot be constrained")
        try:
            return LLTokenizer(
                self._tokenizer_json, n_vocab=self._vocab_size, eos_token=list(self._eos_ids)
            )
        except ValueError as error:
            raise RequestError(
                f"answers of this model cannot be constrained: its tokenizer is of a kind that is "
                f"not supported for it ({shown(str(error))})"
            ) from error


def compile_constraint(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher of the constraint. RequestError for one that is no good."""
    try:
        grammar = grammar_of(constraint)
    except Exception as error:  # the converter from GBNF raises bare Exception
        raise RequestError(
            f"{NAMES[constraint.kind]} cannot be read: {shown(str(error))}"
        ) from None
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    fault = matcher.get_error() or fault_within(matcher)
    if fault:
        raise RequestError(f"{NAMES[constraint.kind]} cannot be used: {shown(fault)}")
    return matcher


def fault_within(matcher: LLMatcher) -> str:
    """What goes wrong within the first steps; "" if nothing does."""
    matcher.compute_bitmask()
    if matcher.is_stopped() and not matcher.is_accepting():
        error = matcher.get_error()
        return "nothing satisfies it" if error.startswith("NoExtension") else error
    probe = matcher.deep_copy()
    for step in range(PROBED):
        started = time.thread_time()
        mask = np.frombuffer(probe.compute_bitmask(), np.uint8)
        if step and time.thread_time() - started > PROBE_SECONDS:
            return "too much work for every token"
        if probe.is_error():
            return probe.get_error()
        probe.consume_token(int(np.argmax(np.unpackbits(mask, bitorder="little"))))
        if probe.is_stopped():
            break
    return probe.get_error()


def grammar_of(constraint: Constraint) -> str:
    """llguidance's own form of a constraint. Raises whatever comes for one that cannot be read."""
    match constraint.kind:
        case "json_schema":
            space = WHITESPACE if constraint.whitespace is None else constraint.whitespace
            check_members(json.loads(constraint.text))
            flexible = space != ""
            return LLMatcher.grammar_from_json_schema(
                constraint.text,
                overrides={
                    "whitespace_flexible": flexible,
                    "whitespace_pattern": space if flexible else None,
                },
            )
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "lark":
            return LLMatcher.grammar_from_lark(any_to_lark(constraint.text))


def check_members(schema: object) -> None:
    """ValueError for an object of too many members anywhere in a schema."""
    unseen = [schema]
    while unseen:
        value = unseen.pop()
        if isinstance(value, dict):
            if len(value) > MAX_MEMBERS:
                raise ValueError(
                    f"it has an object of {len(value)} members; at most {MAX_MEMBERS} are allowed"
                )
            unseen += value.values()
        elif isinstance(value, list):
            unseen += value


def shown(error: str) -> str:
    """An error of the library's, for a client to read."""
    error = " ".join(error.replace("<non-verbose/>", "").split())
    return error if len(error) <= MAX_MESSAGE else error[:MAX_MESSAGE] + "..."
