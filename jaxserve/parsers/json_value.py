"""Where a JSON value ends, one character at a time."""

from __future__ import annotations

from typing import Literal

WHITESPACE = " \t\r\n"
Verdict = Literal["more", "last", "after", "wrong"]


class JsonValue:
    """Follows one value, which begins with the first character taken.

    As lenient as models need it: brackets are counted and strings followed, but a line break in a
    string passes, as does any word. Whether the value is valid JSON is for whoever decodes it.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False

    def take(self, character: str) -> Verdict:
        """Take the next character.

        Returns:
            "more" follows, it is the "last" one of the value, the value ended before it ("after"),
            or it can be in no value here ("wrong").
        """
        if self._in_string:
            return self._take_in_string(character)
        first, self._begun = not self._begun, True
        if character == '"':
            if not first and not self._depth:
                return "after"
            self._in_string = True
        elif character in "{[":
            if not first and not self._depth:
                return "after"
            self._depth += 1
        elif character in "}]":
            if not self._depth:
                return "wrong" if first else "after"
            self._depth -= 1
            return "more" if self._depth else "last"
        elif not (character.isalnum() or character in "+-."):
            if not self._depth:
                return "wrong" if first else "after"
            if character not in WHITESPACE and character not in ":,":
                return "wrong"
        return "more"

    def _take_in_string(self, character: str) -> Verdict:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return "more" if self._depth else "last"
        return "more"
