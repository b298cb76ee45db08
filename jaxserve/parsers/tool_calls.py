"""Finds the calls of functions in an answer."""

from __future__ import annotations

from collections.abc import Collection

from jaxserve.parsers.calls import Call, NamedCall, ObjectCall, read
from jaxserve.parsers.formats import ToolFormat
from jaxserve.parsers.markers import held_back
from jaxserve.parsers.parsed import Parsed


class ToolCallParser:
    """Tells content from calls, piece by piece.

    What looks like a call and turns out to be none is content, as it was written. White space
    around a call is dropped. Once a call has begun (see `calls`) it stays one.

    Attributes:
        num_calls: that have begun.
        ended: the one call that was allowed is complete; what follows is ignored.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, single: bool = False) -> None:
        """Look for calls.

        Args:
            form: how the model writes them.
            names: of the functions on offer. A call of another one is content.
            single: end with the first call.
        """
        self.num_calls = 0
        self.ended = False
        self._form = form
        self._names = names
        self._single = single
        self._advance = self._at_start if form.bare else self._in_content
        self._rest = ""  # of the text, not looked at
        self._held = ""  # looked at, and either part of a call or content
        self._call: Call | None = None

    def push(self, text: str, parsed: Parsed) -> None:
        """Take the next piece of text; what is certain now goes into `parsed`."""
        self._rest += text
        while self._rest and not self.ended and self._advance(parsed):
            pass

    def flush(self, parsed: Parsed) -> None:
        """Nothing follows: what could have become a call is content."""
        if self.ended:
            return
        between_calls = self._advance == self._after_call
        if not (between_calls and any(mark.startswith(self._rest) for mark in self._form.between)):
            parsed.content += self._held + self._rest
        self._held = self._rest = ""

    # Where the parser is. Each takes from `_rest` what it can, and returns whether the next one
    # can go on with what is left.

    def _at_start(self, parsed: Parsed) -> bool:
        call = self._rest.lstrip()
        if not call:
            return False
        if call[0] == "{":
            self._held = self._rest[: -len(call)]
            self._rest = call
            self._advance = self._before_call
        else:
            self._advance = self._in_content
        return True

    def _in_content(self, parsed: Parsed) -> bool:
        before, opening, after = self._rest.partition(self._form.opening)
        if not opening:
            kept = held_back(self._rest, self._form.opening)
            parsed.content += self._rest[: len(self._rest) - kept]
            self._rest = self._rest[len(self._rest) - kept :]
            return False
        text = before.rstrip()
        parsed.content += text
        self._held = before[len(text) :] + opening
        self._rest = after
        self._advance = self._before_call
        return True

    def _before_call(self, parsed: Parsed) -> bool:
        call = self._rest.lstrip()
        if not call:
            return False
        self._held += self._rest[: -len(call)]
        self._rest = call
        if call[0] == "[" and self._form.listed and not self._held.endswith("["):
            self._held += "["
            self._rest = call[1:]
        elif call[0] == "{":
            self._call = ObjectCall(self._names)
            self._advance = self._in_call
        elif self._form.named and (call[0].isalnum() or call[0] == "_"):
            self._call = NamedCall(self._names)
            self._advance = self._in_call
        else:
            self._no_call(parsed)
        return True

    def _in_call(self, parsed: Parsed) -> bool:
        assert self._call is not None
        begun = self._call.name is not None
        count = read(self._call, self._rest)
        self._held += self._rest[:count]
        self._rest = self._rest[count:]
        if self._call.name is not None:
            if not begun:
                self.num_calls += 1
                parsed.add_call(self.num_calls - 1, self._call.name)
            parsed.add_arguments(self.num_calls - 1, "".join(self._call.arguments))
            self._call.arguments.clear()
            self._held = ""
        if not self._call.ended:
            return False
        if self._call.name is None:
            self._no_call(parsed)
        else:
            self._advance = self._after_call
            self.ended = self._single
        return True

    def _after_call(self, parsed: Parsed) -> bool:
        self._rest = self._rest.lstrip()
        if not self._rest:
            return False
        for mark in self._form.between:
            if self._rest.startswith(mark):
                self._rest = self._rest[len(mark) :]
                return True
        if self._rest[0] == "{":
            self._advance = self._before_call
        elif any(mark.startswith(self._rest) for mark in self._form.between):
            return False
        else:
            self._advance = self._in_content
        return True

    def _no_call(self, parsed: Parsed) -> None:
        parsed.content += self._held
        self._held = ""
        self._advance = self._in_content
