"""How families of models write calls, as data, and which of the ways a chat template stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way to write calls.

    Attributes:
        name: on the command line.
        opening: before a call, or before a list of them.
        between: what may follow a call, in any number.
        bare: an answer that begins with a call's object needs no `opening`.
        listed: calls may be in a list. named: a call may be its name, then its arguments.
        writes_names: such calls are what the model is used to.
        arguments_key: under which the arguments are, where a call is an object.
        marks: tokens that have a meaning here, shown to the parser even if they are special.
        short_ids: calls have ids of nine letters and digits; templates insist on it.
    """

    name: str
    opening: str
    between: tuple[str, ...]
    bare: bool = False
    listed: bool = False
    named: bool = False
    writes_names: bool = False
    arguments_key: str = "arguments"
    marks: frozenset[str] = frozenset()
    short_ids: bool = False


HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    ("</tool_call>",),
    marks=frozenset({"<tool_call>", "</tool_call>"}),
)
LLAMA3 = ToolFormat(
    "llama3",
    "<|python_tag|>",
    (";",),
    bare=True,
    arguments_key="parameters",
    marks=frozenset({"<|python_tag|>"}),
)
MISTRAL = ToolFormat(
    "mistral",
    "[TOOL_CALLS]",
    (",", "]"),
    listed=True,
    named=True,
    marks=frozenset({"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}),
    short_ids=True,
)
FORMATS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}


def find_format(name: str, template: str) -> ToolFormat | None:
    """The format of this name; "auto" is the one of the chat template, "none" is None."""
    if name == "auto":
        return recognise_format(template)
    form = FORMATS.get(name)
    if form is MISTRAL and "[ARGS]" in template:
        return replace(MISTRAL, writes_names=True)
    return form


def recognise_format(template: str) -> ToolFormat | None:
    """The way a chat template shows the model to write calls, or None if it is none of these."""
    if "[TOOL_CALLS]" in template:
        return find_format("mistral", template)
    if "<tool_call>" in template and re.search(r"""["']arguments\\?["']""", template):
        return HERMES  # others write something else than JSON between these marks
    if "<|python_tag|>" in template and "<function=" not in template:
        return LLAMA3
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return LLAMA3  # those of Llama 3.2 do not name the tag
    return None
