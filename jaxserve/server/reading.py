"""How the text of answers is read: by the model's habits, and by what a request offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.parsers.answer import AnswerParser
from jaxserve.parsers.formats import ToolFormat, find_format
from jaxserve.parsers.thinking import CLOSING, MARKS, OPENING, ThinkingParser
from jaxserve.parsers.tool_calls import ToolCallParser
from jaxserve.server.openai import ChatBody
from jaxserve.server.text import Tokenizer
from jaxserve.server.tools import ToolUse

LAST_TOKENS = 16
"""Of a prompt: enough to hold the mark that opens the thoughts."""


@dataclass(frozen=True, slots=True)
class Habits:
    """How the model writes its answers.

    Attributes:
        calls: of functions; None if that is not known.
        thinks: in `<think>...</think>`, before it answers.
    """

    calls: ToolFormat | None = None
    thinks: bool = False


NO_HABITS = Habits()


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are read.

    Attributes:
        tools: functions the model may call; None reads no calls.
        thinks: thoughts come first, if the model has any.
        opened: the prompt ends inside the thoughts.
        include_reasoning: the client wants to see them.
    """

    tools: ToolUse | None = None
    thinks: bool = False
    opened: bool = False
    include_reasoning: bool = True

    @property
    def marks(self) -> frozenset[str]:
        """Tokens the parser has to see, even if they are special."""
        calls = frozenset[str]() if self.tools is None else self.tools.form.marks
        return calls | MARKS if self.thinks else calls

    @property
    def short_ids(self) -> bool:
        """See `ToolFormat`."""
        return self.tools is not None and self.tools.form.short_ids

    def make_parser(self) -> AnswerParser:
        """For one answer."""
        thinking = ThinkingParser(opened=self.opened) if self.thinks else None
        calls = None
        if self.tools is not None:
            use = self.tools
            calls = ToolCallParser(use.form, use.names, single=not use.parallel)
        return AnswerParser(thinking, calls, include_reasoning=self.include_reasoning)


PLAIN = Reading()
"""All text is content."""


def model_habits(tool_parser: str, reasoning_parser: str, template: str) -> Habits:
    """What the operator says of the model, or else its chat template.

    Args:
        tool_parser: "auto", "none", or the name of a format.
        reasoning_parser: "auto", "none" or "think".
        template: the chat template's text.
    """
    calls = find_format(tool_parser, template)
    if reasoning_parser == "auto":
        return Habits(calls, OPENING in template or CLOSING in template)
    return Habits(calls, reasoning_parser == "think")


def chat_reading(
    body: ChatBody,
    tools: ToolUse | None,
    habits: Habits,
    prompt_ids: Sequence[int],
    tokenizer: Tokenizer,
) -> Reading:
    """How the answers to a chat are read."""
    opened = False
    if habits.thinks:
        end = tokenizer.decode(prompt_ids[-LAST_TOKENS:], skip_special_tokens=False)
        opened = end.rstrip().endswith(OPENING)
    return Reading(tools, habits.thinks, opened, body.include_reasoning is not False)
