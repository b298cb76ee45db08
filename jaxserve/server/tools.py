"""The functions a chat offers to the model, and what the client says of their use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from jaxserve.errors import RequestError
from jaxserve.parsers.formats import ToolFormat
from jaxserve.server.openai import ChatBody, FunctionDefinition, NamedTool, Tool
from jaxserve.server.text import Tokenizer

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NO_PARAMETERS: Mapping[str, object] = MappingProxyType({"type": "object", "properties": {}})
ToolChoice = Literal["auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Functions on offer.

    Attributes:
        form: how the model writes calls.
        functions: that it may call: the one the client names, or all.
        tools: what the template shows, in OpenAI's form.
        choice: whether a call has to come.
        parallel: more than one call may come.
    """

    form: ToolFormat
    functions: tuple[FunctionDefinition, ...]
    tools: tuple[dict[str, object], ...]
    choice: ToolChoice
    parallel: bool

    @property
    def forced(self) -> bool:
        """The answer is a call."""
        return self.choice != "auto"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)


def tool_use(body: ChatBody, tokenizer: Tokenizer, form: ToolFormat | None) -> ToolUse | None:
    """What the chat offers; None for nothing, or nothing that may be used.

    Raises:
        RequestError: a tool is not a function, or malformed; a choice that cannot be made; or the
            model knows no tools, or writes calls in a way that is not known here.
    """
    functions = checked_functions(body.tools or ())
    choice, named = tool_choice(body.tool_choice, functions)
    if not functions or choice == "none":
        return None
    if "tools" not in tokenizer.template_variables:
        raise RequestError(
            "this model's chat template does not know tools: leave tools out, or send tool_choice "
            "'none'",
            param="tools",
        )
    if form is None:
        raise RequestError(
            "how this model writes calls is not known: the server can be told with --tool-parser",
            param="tools",
        )
    return ToolUse(
        form=form,
        functions=functions if named is None else (named,),
        tools=tuple(shown(function) for function in functions),
        choice=choice,
        parallel=body.parallel_tool_calls is not False and named is None,
    )


def checked_functions(tools: Sequence[Tool]) -> tuple[FunctionDefinition, ...]:
    """The functions, each name once. RequestError for anything else."""
    if len(tools) > MAX_TOOLS:
        raise wrong("tools", f"has {len(tools)} tools; at most {MAX_TOOLS} are allowed")
    seen: dict[str, FunctionDefinition] = {}
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise wrong(f"tools[{i}].type", f"is {tool.type[:40]!r}, expected 'function'")
        if tool.function is None:
            raise wrong(f"tools[{i}].function", "is missing")
        name = tool.function.name
        if not NAME.fullmatch(name):
            raise wrong(
                f"tools[{i}].function.name",
                f"is {name[:80]!r}: 1 to 64 letters, digits, '_' and '-' are allowed",
            )
        if name in seen:
            raise wrong(f"tools[{i}].function.name", f"is {name!r}, as that of another tool")
        kind = (tool.function.parameters or NO_PARAMETERS).get("type", "object")
        if kind != "object":
            raise wrong(
                f"tools[{i}].function.parameters",
                f"is a JSON schema of type {str(kind)[:40]!r}: arguments are an 'object'",
            )
        seen[name] = tool.function
    return tuple(seen.values())


def tool_choice(
    given: str | NamedTool | None, functions: Sequence[FunctionDefinition]
) -> tuple[ToolChoice | Literal["none"], FunctionDefinition | None]:
    """What the client wants, and the one function it names."""
    if given in (None, "auto"):
        return "auto", None
    if given == "none":
        return "none", None
    if isinstance(given, NamedTool) and given.type == "function" and given.function is not None:
        for function in functions:
            if function.name == given.function.name:
                return "named", function
        raise RequestError(
            f"tool_choice names {given.function.name[:80]!r}, which is not among tools",
            param="tool_choice",
        )
    if given != "required":
        raise RequestError(
            "tool_choice is none of 'none', 'auto', 'required' and "
            '{"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    if not functions:
        raise RequestError(
            "tool_choice is 'required' and there are no tools to choose from", param="tool_choice"
        )
    return "required", None


def shown(function: FunctionDefinition) -> dict[str, object]:
    """A function as templates show it to the model."""
    described: dict[str, object] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = function.parameters or dict(NO_PARAMETERS)
    return {"type": "function", "function": described}


def wrong(place: str, what: str) -> RequestError:
    return RequestError(f"{place} {what}", param="tools")
