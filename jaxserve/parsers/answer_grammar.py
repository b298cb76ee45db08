"""A grammar of answers that think, call functions, or keep to a form, in the model's own way.

In llguidance's variant of Lark. What it lets through, `AnswerParser` reads as thoughts, as calls
whose arguments follow their schemas, and as content that has its form. Knows no vocabulary but the
tokens it is told of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxserve.parsers.formats import ToolFormat
from jaxserve.parsers.thinking import CLOSING, OPENING

Thoughts = Literal["none", "possible", "open"]
"""Whether the model may think before it answers, or is thinking already."""
TokenId = Callable[[str], int | None]
"""The id of the token that a mark is in the vocabulary, or None if it is spelled."""

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as models have mostly seen it: as Python writes it."""
TERMINALS = r"""
TEXT: /(.|\n)*/
BRACELESS: /\s*([^{\s](.|\n)*)?/
SPACE: /[ \t\n]{0,4}/
"""


@dataclass(frozen=True, slots=True)
class CallRules:
    """How functions may be called.

    Attributes:
        form: how the model writes calls.
        schemas: name of a function -> JSON schema of its arguments.
        forced: the answer is calls and nothing else; otherwise it may have none.
        parallel: there may be several.
    """

    form: ToolFormat
    schemas: Mapping[str, Mapping[str, object]]
    forced: bool
    parallel: bool


def answer_grammar(
    token_id: TokenId,
    *,
    thoughts: Thoughts = "none",
    calls: CallRules | None = None,
    content: str | None = None,
) -> str:
    """The grammar.

    Args:
        content: the body of a rule for what the content is like (`json_rule`, `regex_rule`); None
            is any text. An answer with calls has none then.
    """
    rules = ["%llguidance {}", *_thoughts(thoughts, token_id)]
    answer = "content" if content is not None else "TEXT"
    if calls is not None:
        opening = mark(calls.form.opening, token_id)
        if calls.forced:
            answer = _only_calls(calls, opening, marked=not calls.form.bare)
        elif content is not None:  # which may begin as a call without a mark does
            answer = f"{_only_calls(calls, opening, marked=True)} | content"
        else:
            answer = _text_with_calls(calls)
        rules += [
            f"block: {_block(calls, token_id)}",
            *_text_before("head", "TEXT", calls.form.opening, token_id),
            *_text_before("first_head", "BRACELESS", calls.form.opening, token_id),
            *_functions(calls, token_id),
        ]
    if content is not None:
        rules.append(f"content: {content}")
    return "\n".join([*rules, f"start: thoughts ({answer})"]) + TERMINALS


def json_rule(schema: Mapping[str, object], options: Mapping[str, object]) -> str:
    """The body of a rule for JSON that fits a schema; `options` are llguidance's own."""
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def regex_rule(expression: str) -> str:
    """The body of a rule for text that a regular expression matches."""
    escaped = re.sub(r"(?s)\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], expression)
    return f"/{escaped.replace(chr(10), chr(92) + 'n')}/"


def mark(name: str, token_id: TokenId) -> str:
    """A mark as the vocabulary has it. A token is named by its id: text never stands for it."""
    found = token_id(name)
    return json.dumps(name) if found is None else f"<[{found}]>"


def _text_before(rule: str, text: str, name: str, token_id: TokenId) -> list[str]:
    """Rules for text that ends with the first mark, however that is written."""
    spelled = f"{rule}_spelled[lazy]: {text} {json.dumps(name)}"
    token = "" if token_id(name) is None else f" | {text} {mark(name, token_id)}"
    return [f"{rule}: {rule}_spelled{token}", spelled]


def _thoughts(thoughts: Thoughts, token_id: TokenId) -> list[str]:
    if thoughts == "none":
        return ['thoughts: ""']
    begin = "" if thoughts == "open" else f'"" | SPACE {mark(OPENING, token_id)} '
    return [
        f"thoughts: {begin}thinking SPACE",
        *_text_before("thinking", "TEXT", CLOSING, token_id),
    ]


def _only_calls(calls: CallRules, opening: str, *, marked: bool) -> str:
    form = calls.form
    if form.bare:
        return f"{opening} block" if marked else f"{opening}? block"
    if not calls.parallel or (form.listed and not form.writes_names):
        return f"{opening} block"
    between = "" if form.writes_names else '"\\n" '
    return f"{opening} block ({between}{opening} block)*"


def _text_with_calls(calls: CallRules) -> str:
    if calls.form.bare:
        return "block | BRACELESS | first_head block (head block)* TEXT"
    return "(head block)* TEXT"


def _block(calls: CallRules, token_id: TokenId) -> str:
    """What follows a mark."""
    form = calls.form
    if form.writes_names:
        return "call"
    if form.bare:
        return 'call ("; " call)*' if calls.parallel else "call"
    if form.listed:
        several = ' (", " call)*' if calls.parallel else ""
        return f'/ ?/ "[" call{several} "]"'
    return f'"\\n" call "\\n" {mark(form.between[0], token_id)}'


def _functions(calls: CallRules, token_id: TokenId) -> list[str]:
    form, rules = calls.form, []
    for i, (name, schema) in enumerate(calls.schemas.items()):
        arguments = json_rule(schema, SPACING)
        if form.writes_names:
            rules.append(f"call_{i}: {json.dumps(name)} {mark('[ARGS]', token_id)} {arguments}")
        else:
            begin = f'{{"name": "{name}", "{form.arguments_key}": '
            rules.append(f'call_{i}: {json.dumps(begin)} {arguments} "}}"')
    return ["call: " + " | ".join(f"call_{i}" for i in range(len(calls.schemas))), *rules]
