"""Ends a text at the first stop string, however the text arrives in pieces. Knows no tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Finds the first of several stop strings to be complete, one piece of text at a time.

    The answer depends on the text alone, never on how it was cut into pieces. The stop string
    that is complete first wins; of several that end at the same character the longest, so that
    no character of any of them is shown.

    All stop strings are followed at once (Aho-Corasick): one step per character, whatever their
    number and length. What is held back is the longest end of the text that is also a beginning
    of a stop string. That is known from the automaton's state, so the text itself is not kept.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Prepare to look for `stops`.

        Args:
            stops: may be empty, then all text passes straight through.
            include_stop: let the stop string itself be shown.

        Raises:
            ValueError: a stop string is empty; it would match before the first character.
        """
        if "" in stops:
            raise ValueError("a stop string is empty; give at least one character, or none at all")
        self._include_stop = include_stop
        self._matched = False
        self._state = 0
        self._next: list[dict[str, int]] = [{}]  # state 0 has read nothing that matters
        self._path: list[tuple[str, int]] = [("", 0)]  # (stop, n): the state has read stop[:n]
        self._match: list[int] = [0]  # length of the longest stop that ends here, or 0
        for stop in stops:
            self._add(stop)
        self._fallback = [0] * len(self._next)  # the longest proper suffix that is a state too
        self._link()

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece of text.

        Returns:
            The text that may now be shown, and whether a stop string has ended the text. Once
            it has, every later push returns ("", True).
        """
        if self._matched:
            return "", True
        before = self._path[self._state]
        for index, character in enumerate(text):
            self._state = self._advance(self._state, character)
            match = self._match[self._state]
            if match:
                self._matched = True
                hidden = 0 if self._include_stop else match
                return _cut(before, text[: index + 1], hidden), True
        return _cut(before, text, self._path[self._state][1]), False

    def flush(self) -> str:
        """The text still held back, now that nothing follows. Empty after a match."""
        stop, length = self._path[self._state]
        self._state = 0
        return "" if self._matched else stop[:length]

    def _add(self, stop: str) -> None:
        state = 0
        for index, character in enumerate(stop):
            child = self._next[state].get(character)
            if child is None:
                child = len(self._next)
                self._next[state][character] = child
                self._next.append({})
                self._path.append((stop, index + 1))
                self._match.append(0)
            state = child
        self._match[state] = len(stop)

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            self._match[state] = self._match[state] or self._match[fallback]
            for character, child in self._next[state].items():
                self._fallback[child] = self._advance(fallback, character)
                queue.append(child)

    def _advance(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)


def _cut(held: tuple[str, int], text: str, hidden: int) -> str:
    """`stop[:length] + text` without its last `hidden` characters, where held = (stop, length).

    Copies no more than it returns, which keeps a long stop string linear in one-character pushes.
    """
    stop, length = held
    shown = length + len(text) - hidden
    return stop[:shown] if shown <= length else stop[:length] + text[: shown - length]
