"""An answer's text, all of it: first what the model thinks, then content and calls."""

from __future__ import annotations

from jaxserve.parsers.parsed import Parsed
from jaxserve.parsers.thinking import ThinkingParser
from jaxserve.parsers.tool_calls import ToolCallParser


class AnswerParser:
    """Reads one answer. Without either parser all text is content."""

    def __init__(
        self,
        thinking: ThinkingParser | None = None,
        tool_calls: ToolCallParser | None = None,
        *,
        include_reasoning: bool = True,
    ) -> None:
        self._thinking = thinking
        self._tool_calls = tool_calls
        self._include_reasoning = include_reasoning

    @property
    def thinking(self) -> bool:
        """The model has not begun to answer."""
        return self._thinking is not None and self._thinking.thinking

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return 0 if self._tool_calls is None else self._tool_calls.num_calls

    @property
    def ended(self) -> bool:
        """Nothing that follows is wanted."""
        return self._tool_calls is not None and self._tool_calls.ended

    def push(self, text: str, parsed: Parsed) -> None:
        """Take the next piece of text; what is certain now goes into `parsed`."""
        if self._thinking is not None:
            thoughts, text = self._thinking.push(text)
            self._add_thoughts(thoughts, parsed)
        self._read(text, parsed)

    def flush(self, parsed: Parsed) -> None:
        """Nothing follows: what was held back is what it looks like."""
        if self._thinking is not None:
            thoughts, text = self._thinking.flush()
            self._add_thoughts(thoughts, parsed)
            self._read(text, parsed)
        if self._tool_calls is not None:
            self._tool_calls.flush(parsed)

    def _add_thoughts(self, thoughts: str, parsed: Parsed) -> None:
        if self._include_reasoning:
            parsed.reasoning += thoughts

    def _read(self, text: str, parsed: Parsed) -> None:
        if self._tool_calls is None:
            parsed.content += text
        else:
            self._tool_calls.push(text, parsed)
