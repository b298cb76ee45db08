"""Runs a jinja2 template that came with a checkpoint: it cannot reach the machine or run for ever.

A template is the operator's choice, not the client's, but it is still a stranger's program, and
the client's messages are what its loops run over. Jinja has no time limit and a thread cannot be
stopped from outside, so the limits are compiled into the template:

- every passage through the body of a loop, macro or call block first pays one step and looks at
  the clock. There is no other way to repeat anything, so every rendering ends;
- `range` is bounded by jinja's own sandbox;
- whatever an operator, a filter or a call produces is measured, so that no value can be doubled
  again and again; `*` and `**` are measured before they are computed;
- the text is counted while it is generated.

One single call may still overshoot the size limit before it is measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_BUDGET = "budget of this rendering"  # not an identifier: no template can name or replace it


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may use.

    Attributes:
        steps: passages through the bodies of loops, macros and call blocks.
        seconds: wall time, looked at once a step.
        characters: of the result, and of any value on the way (items of a list, bits of a number).
    """

    steps: int = 200_000
    seconds: float = 5.0
    characters: int = 8 << 20


class TemplateRefusal(jinja2.TemplateError):
    """The template called `raise_exception`: it does not accept this conversation."""


class LimitExceeded(jinja2.TemplateError):
    """The rendering used more than its `RenderLimits`."""


class BoundedTemplate:
    """A compiled chat template, as Hugging Face's chat templates expect to be run.

    Attributes:
        variables: that it looks at.
    """

    def __init__(self, source: str, *, limits: RenderLimits | None = None) -> None:
        """Compile `source`.

        Raises:
            jinja2.TemplateSyntaxError: `source` is not a template.
        """
        self._limits = limits or RenderLimits()
        environment = _Sandbox(self._limits)
        tree = environment.parse(source)
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        tree = _MeteredBodies().visit(tree)
        self._template = environment.from_string(tree)

    def render(self, variables: Mapping[str, object]) -> str:
        """The template's text.

        Raises:
            TemplateRefusal: the template refuses, in its own words.
            LimitExceeded: it went on for too long or grew too large.
            Exception: whatever else the template's expressions raise.
        """
        budget = _Budget(self._limits)
        pieces = []
        left = self._limits.characters
        for piece in self._template.generate({**variables, _BUDGET: budget}):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                raise LimitExceeded(f"its text exceeds {self._limits.characters} characters")
        return "".join(pieces)


class _Budget:
    """What is left of the limits; one per rendering."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._steps = 0
        self._deadline = time.monotonic() + limits.seconds

    def spend(self) -> None:
        self._steps += 1
        if self._steps > self._limits.steps:
            raise LimitExceeded(f"its loops exceed {self._limits.steps} steps")
        if time.monotonic() > self._deadline:
            raise LimitExceeded(f"it takes longer than {self._limits.seconds} seconds")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's text for training; no-op."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _MeteredBodies(NodeTransformer):
    """Puts a call of `_Sandbox.spend` into every body and one of `measured` around values."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._metered(node, node.body)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._metered(node, node.body)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._metered(node, node.body)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("measured", node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        # The filter of a filter block has no operand in the tree: its body's text is measured.
        return node if _operand(node) is None else _call("measured", node)

    def _metered(self, node: nodes.Node, body: list[nodes.Node]) -> nodes.Node:
        self.generic_visit(node)
        body.insert(0, nodes.ExprStmt(_call("spend", nodes.ContextReference(lineno=node.lineno))))
        return node


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, limits: RenderLimits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            optimized=False,  # constants are computed under the limits too, not when compiling
        )
        self._limits = limits
        self.concat = self._concat  # type: ignore[method-assign]  # declared as a function
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def spend(self, context: Context) -> None:
        context.resolve(_BUDGET).spend()

    def measured(self, value: object) -> object:
        if _size(value) > self._limits.characters:
            raise LimitExceeded(f"a value in it exceeds the size of {self._limits.characters}")
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> object:
        if operator == "*":
            bits = isinstance(left, int) and isinstance(right, int)
            count = _size(left) + _size(right) if bits else _repeated(left, right)
        elif operator == "**":
            count = _size(left) * abs(right) if isinstance(right, int) else 0
        else:
            count = 0
        if count > self._limits.characters:
            raise LimitExceeded(f"a value in it exceeds the size of {self._limits.characters}")
        return self.measured(super().call_binop(context, operator, left, right))

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> object:
        return self.measured(super().call(context, called, *args, **kwargs))

    def _concat(self, pieces: Iterable[str]) -> str:
        pieces = list(pieces)
        if sum(map(len, pieces)) > self._limits.characters:
            raise LimitExceeded(f"a value in it exceeds the size of {self._limits.characters}")
        return "".join(pieces)


def _call(method: str, argument: nodes.Expr) -> nodes.Call:
    line = argument.lineno
    return nodes.Call(nodes.EnvironmentAttribute(method), [argument], [], None, None, lineno=line)


def _operand(node: nodes.Expr | None) -> nodes.Expr | None:
    while isinstance(node, nodes.Filter):
        node = node.node
    return node


def _size(value: object) -> int:
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _repeated(left: object, right: object) -> int:
    if isinstance(left, int):
        return left * _size(right)
    return right * _size(left) if isinstance(right, int) else 0


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Prompts are no HTML: jinja's own filter would write "<" as "\u003c".
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys
    )
