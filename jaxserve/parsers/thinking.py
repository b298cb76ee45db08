"""Tells what a model thinks from what it answers: `<think>...</think>` at the start."""

from __future__ import annotations

from jaxserve.parsers.markers import held_back

OPENING, CLOSING = "<think>", "</think>"
MARKS = frozenset({OPENING, CLOSING})


class ThinkingParser:
    """Splits a text, piece by piece. White space around the thoughts is dropped.

    Attributes:
        thinking: it is thinking now.
    """

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt has opened the block already, so the text begins inside it."""
        self.thinking = opened
        self._rest = ""
        self._advance = self._before_thoughts if opened else self._at_start

    def push(self, text: str) -> tuple[str, str]:
        """The thoughts and the answer that are certain now."""
        self._rest += text
        thoughts = answer = ""
        while self._rest:
            found = self._advance()
            if found is None:
                break
            thoughts += found[0]
            answer += found[1]
        return thoughts, answer

    def flush(self) -> tuple[str, str]:
        """What is left when nothing follows."""
        rest, self._rest = self._rest, ""
        return (rest, "") if self.thinking else ("", rest)

    # Where the parser is. Each takes from `_rest`, and returns None if it needs more of it.

    def _at_start(self) -> tuple[str, str] | None:
        text = self._rest.lstrip()
        if text.startswith(OPENING):
            self.thinking = True
            self._advance = self._before_thoughts
        elif OPENING.startswith(text):
            return None
        else:
            self._advance = self._in_answer
        return "", ""

    def _before_thoughts(self) -> tuple[str, str] | None:
        self._rest = self._rest.lstrip()
        if self._rest.startswith(OPENING):
            self._rest = self._rest.removeprefix(OPENING)
        elif OPENING.startswith(self._rest):
            return None
        else:
            self._advance = self._in_thoughts
        return "", ""

    def _in_thoughts(self) -> tuple[str, str] | None:
        before, closing, after = self._rest.partition(CLOSING)
        if closing:
            self.thinking = False
            self._rest = after
            self._advance = self._before_answer
            return before.rstrip(), ""
        shown = len(self._rest) - held_back(self._rest, CLOSING)
        text, self._rest = self._rest[:shown], self._rest[shown:]
        return (text, "") if text else None

    def _before_answer(self) -> tuple[str, str] | None:
        self._rest = self._rest.lstrip()
        self._advance = self._in_answer if self._rest else self._before_answer
        return "", ""

    def _in_answer(self) -> tuple[str, str] | None:
        text, self._rest = self._rest, ""
        return "", text
