"""From the fields by which OpenAI and vLLM ask for structured output to the engine's constraint.

What a schema or a grammar says is for the engine to judge, which has the vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from jaxserve.errors import RequestError
from jaxserve.request import MAX_CONSTRAINT_BYTES, Constraint
from jaxserve.server.openai import GenerationBody, ResponseFormat, StructuredOutputs

ANY_OBJECT = '{"type": "object"}'
BACKENDS = ("auto", "guidance", "llguidance")
FORMATS = ("text", "json_object", "json_schema")


@dataclass(frozen=True, slots=True)
class Asked:
    """One way in which the body constrains the answer.

    Attributes:
        name: of the field, with a path into it.
        constraint: what it asks for.
    """

    name: str
    constraint: Constraint

    @property
    def param(self) -> str:
        return self.name.partition(".")[0]


def asked_constraint(body: GenerationBody) -> Asked | None:
    """What the answer has to be like; None leaves it free.

    Raises:
        RequestError: there are several, one is empty or too large, something about it is not
            supported, or something goes with it that cannot.
    """
    if body.guided_decoding_backend not in (None, *BACKENDS):
        raise RequestError(
            f"guided_decoding_backend is {body.guided_decoding_backend[:40]!r}; this server has "
            f"{', '.join(BACKENDS)}",
            param="guided_decoding_backend",
        )
    asked = [*from_format(body.response_format), *from_options(body.structured_outputs)]
    asked += from_guided(body)
    if len(asked) > 1:
        first, second = asked[:2]
        raise RequestError(
            f"{first.name} and {second.name} both constrain the answer: send one",
            param=second.param,
        )
    whitespace = asked_whitespace(body)
    if not asked:
        if whitespace is not None:
            raise RequestError(
                f"{whitespace.name} is for JSON, and none is asked for", param=whitespace.param
            )
        return None
    (only,) = asked
    check_size(only)
    if body.ignore_eos:
        raise RequestError(
            f"ignore_eos cannot go with {only.name}: the answer ends where that says",
            param="ignore_eos",
        )
    if whitespace is None:
        return only
    if only.constraint.kind != "json_schema":
        raise RequestError(
            f"{whitespace.name} is for JSON, and {only.name} asks for something else",
            param=whitespace.param,
        )
    check_size(whitespace, least=0)
    return Asked(only.name, replace(only.constraint, whitespace=whitespace.constraint.text))


def from_format(given: ResponseFormat | None) -> list[Asked]:
    """What `response_format` asks for."""
    if given is None:
        return []
    if given.type not in FORMATS:
        raise RequestError(
            f"response_format.type is {given.type[:40]!r}, expected one of {', '.join(FORMATS)}",
            param="response_format",
        )
    if (given.type == "json_schema") != (given.json_schema is not None):
        raise RequestError(
            "response_format.json_schema goes with the type json_schema, and only with that",
            param="response_format",
        )
    if given.type == "text":
        return []
    if given.json_schema is None:
        return [Asked("response_format", Constraint("json_schema", ANY_OBJECT))]
    if given.json_schema.schema is None:
        raise RequestError("response_format.json_schema.schema is missing", param="response_format")
    return [Asked("response_format", json_schema(given.json_schema.schema))]


def from_options(given: StructuredOutputs | None) -> list[Asked]:
    """What `structured_outputs` asks for."""
    if given is None:
        return []
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(given, name):
            raise RequestError(
                f"structured_outputs.{name} is not supported: leave it out",
                param="structured_outputs",
            )
    prefix = "structured_outputs."
    found = sources(prefix, given.json, given.regex, given.choice, given.grammar)
    if given.json_object:
        found.append(Asked(prefix + "json_object", Constraint("json_schema", ANY_OBJECT)))
    return found


def from_guided(body: GenerationBody) -> list[Asked]:
    """What vLLM's older fields ask for."""
    return sources(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )


def sources(
    prefix: str,
    schema: object,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> list[Asked]:
    """Those that are there."""
    found = {
        "json": None if schema is None else json_schema(schema),
        "regex": None if regex is None else Constraint("regex", regex),
        "choice": None if choice is None else one_of(choice, prefix),
        "grammar": None if grammar is None else Constraint("lark", grammar),
    }
    return [Asked(prefix + name, value) for name, value in found.items() if value is not None]


def json_schema(schema: object) -> Constraint:
    """A schema, given as JSON or as the text of it."""
    return Constraint("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def one_of(texts: list[str], prefix: str) -> Constraint:
    """A grammar of these texts."""
    if not all(texts):
        raise RequestError(
            f"{prefix}choice has an empty text: leave it out",
            param=(prefix + "choice").partition(".")[0],
        )
    return Constraint("lark", "start: " + " | ".join(map(json.dumps, texts)) if texts else "")


def asked_whitespace(body: GenerationBody) -> Asked | None:
    """What may be between tokens of JSON, as text."""
    name, pattern = "guided_whitespace_pattern", body.guided_whitespace_pattern
    options = body.structured_outputs
    if options is not None and pattern is None:
        name, pattern = "structured_outputs.whitespace_pattern", options.whitespace_pattern
        if options.disable_any_whitespace:
            if pattern:
                raise RequestError(
                    f"{name} and disable_any_whitespace contradict each other: send one",
                    param="structured_outputs",
                )
            name, pattern = "structured_outputs.disable_any_whitespace", ""
    return None if pattern is None else Asked(name, Constraint("regex", pattern))


def check_size(asked: Asked, *, least: int = 1) -> None:
    """RequestError for a text that is empty, too large, or no valid Unicode."""
    text, param = asked.constraint.text, asked.param
    if len(text) < least:
        raise RequestError(f"{asked.name} is empty: nothing could come", param=param)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(
            f"{asked.name} has half of a surrogate pair: send whole characters", param=param
        ) from None
    if size > MAX_CONSTRAINT_BYTES:
        raise RequestError(
            f"{asked.name} has {size} bytes; at most {MAX_CONSTRAINT_BYTES} are allowed",
            param=param,
        )
