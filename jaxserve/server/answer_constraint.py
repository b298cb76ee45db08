"""What the engine holds answers to: the form the client asks for, together with calls and thoughts.

A form is that of the content. A model that thinks does so first, and calls come in its place.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from jaxserve.errors import RequestError
from jaxserve.parsers.answer_grammar import (
    SPACING,
    CallRules,
    Thoughts,
    answer_grammar,
    json_rule,
    regex_rule,
)
from jaxserve.request import Constraint
from jaxserve.server.constraint import Asked, check_size
from jaxserve.server.openai import FunctionDefinition
from jaxserve.server.reading import Reading
from jaxserve.server.text import Tokenizer
from jaxserve.server.tools import ToolUse

ANY_ARGUMENTS: Mapping[str, object] = {"type": "object"}
NO_ARGUMENTS = {**ANY_ARGUMENTS, "properties": {}, "additionalProperties": False}


def answer_constraint(
    asked: Asked | None, reading: Reading, tokenizer: Tokenizer, *, ignore_eos: bool
) -> Asked | None:
    """What the answers to a request are held to, and the field that says so.

    Args:
        asked: what the content has to be like, by itself.
        reading: tells what else an answer may hold.

    Raises:
        RequestError: the form asked for cannot go with what else there may be, or the schemas of
            functions are too large.
    """
    use = reading.tools
    held = use is not None and (use.forced or any(f.strict for f in use.functions))
    if not held and (asked is None or (use is None and not reading.thinks)):
        return asked
    if ignore_eos:
        raise RequestError(
            "ignore_eos cannot go with calls that are required or strict: the answer ends where "
            "its grammar does",
            param="ignore_eos",
        )
    if asked is not None and asked.constraint.kind == "lark":
        if use is None and not reading.opened:
            return asked
        raise RequestError(
            f"{asked.name} cannot go with tools, or follow thoughts that the prompt has opened: "
            "send a JSON schema or a regular expression",
            param=asked.param,
        )
    grammar = answer_grammar(
        tokenizer.token_id,
        thoughts=thoughts(reading),
        calls=None if use is None else call_rules(use),
        content=None if asked is None else content_rule(asked),
    )
    name = "tools" if asked is None else asked.name
    together = Asked(name, Constraint("lark", grammar))
    check_size(together)
    return together


def thoughts(reading: Reading) -> Thoughts:
    """Where the model's thoughts are when its answer begins."""
    if not reading.thinks:
        return "none"
    return "open" if reading.opened else "possible"


def call_rules(use: ToolUse) -> CallRules:
    """How the functions may be called. Only those have a form that have to be called, or say so."""
    schemas = {
        function.name: arguments_schema(function)
        if use.forced or function.strict
        else ANY_ARGUMENTS
        for function in use.functions
    }
    return CallRules(use.form, schemas, use.forced, use.parallel)


def arguments_schema(function: FunctionDefinition) -> Mapping[str, object]:
    """What a function's arguments have to be like."""
    if function.parameters is None:
        return NO_ARGUMENTS
    return {**ANY_ARGUMENTS, **function.parameters}


def content_rule(asked: Asked) -> str:
    """The form that is asked for, as the body of a rule. It is a JSON schema or a regex."""
    constraint = asked.constraint
    if constraint.kind == "regex":
        return regex_rule(constraint.text)
    try:
        schema = msgspec.json.decode(constraint.text, type=dict[str, object])
    except msgspec.MsgspecError:
        message = f"{asked.name} is no JSON schema: send an object"
        raise RequestError(message, param=asked.param) from None
    space = constraint.whitespace
    if space is None:
        return json_rule(schema, SPACING)
    options = {"whitespace_flexible": bool(space), "whitespace_pattern": space or None}
    return json_rule(schema, options)
