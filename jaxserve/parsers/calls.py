"""One call of a function, read as it comes: `{"name": ..., "arguments": {...}}`, or
`name[ARGS]{...}`.

A call has begun once its name is that of a function on offer and its arguments have begun as an
object. From there on it is a call, however its arguments go on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Protocol

from jaxserve.parsers.json_value import WHITESPACE, JsonValue

ARGUMENT_KEYS = ("arguments", "parameters")
KEYS = (*ARGUMENT_KEYS, "name", "type", "id")
"""What a call's object may hold before the call has begun."""


class Call(Protocol):
    """A call in the making.

    Attributes:
        name: of the function; None until the call has begun.
        arguments: pieces of them; whoever has seen them clears the list.
        ended: nothing that follows belongs to it.
    """

    name: str | None
    arguments: list[str]
    ended: bool

    def take(self, character: str) -> bool:
        """Take the next character. False if it cannot come here: it does not belong to the call."""


def read(call: Call, text: str) -> int:
    """Let `call` take as many characters of `text` as belong to it; how many that are."""
    for position, character in enumerate(text):
        if not call.take(character):
            call.ended = True
            return position
        if call.ended:
            return position + 1
    return len(text)


class ObjectCall:
    """A call as a JSON object. Its keys may come in any order, arguments as a string of JSON."""

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.arguments: list[str] = []
        self.ended = False
        self._names = names
        self._streams = False
        self._known_name: str | None = None
        self._known_arguments: str | None = None
        self._expected = "{"
        self._key: str | None = None
        self._value: JsonValue | None = None
        self._raw: list[str] = []

    def take(self, character: str) -> bool:
        if self._value is not None:
            return self._take_in_value(character)
        if character in WHITESPACE:
            return True
        if self._expected == "value":
            return self._begin_value(character)
        if character not in self._expected:
            return False
        match character:
            case "{" | ",":
                self._expected = '"'
            case '"':
                self._key = None
                return self._begin_value(character)
            case ":":
                self._expected = "value"
            case "}":
                self.ended = True
                return self.name is not None
        return True

    def _begin_value(self, character: str) -> bool:
        self._value, self._raw = JsonValue(), []
        if character == "{" and self._key in ARGUMENT_KEYS and self._known_name and not self.name:
            self.name = self._known_name
            self._streams = True
        return self._take_in_value(character)

    def _take_in_value(self, character: str) -> bool:
        assert self._value is not None
        verdict = self._value.take(character)
        if verdict == "wrong":
            return False
        if verdict == "after":
            return self._end_value() and self.take(character)
        (self.arguments if self._streams else self._raw).append(character)
        return self._end_value() if verdict == "last" else True

    def _end_value(self) -> bool:
        """False for a value that makes this no call."""
        raw, self._value = "".join(self._raw), None
        if self._streams:
            self._streams = False
        elif self._key is None:
            self._key = _string(raw)
            self._expected = ":"
            return self.name is not None or self._key in KEYS
        elif self._key == "name":
            self._known_name = _string(raw)
            if self.name is None and self._known_name not in self._names:
                return False
        elif self._key in ARGUMENT_KEYS and self.name is None:
            self._known_arguments = _object_text(raw)
            if self._known_arguments is None:
                return False
        self._expected = ",}"
        if self.name is None and self._known_name and self._known_arguments is not None:
            self.name = self._known_name
            self.arguments.append(self._known_arguments)
        return True


class NamedCall:
    """A call as the function's name, maybe marks in brackets, and the arguments' object."""

    _HEAD = re.compile(r"(?P<name>[\w-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?")
    _LONGEST_HEAD = 128

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.arguments: list[str] = []
        self.ended = False
        self._names = names
        self._head = ""
        self._value = JsonValue()

    def take(self, character: str) -> bool:
        if self.name is None:
            if character != "{":
                self._head += character
                allowed = character.isalnum() or character in "_-[]"
                return allowed and len(self._head) <= self._LONGEST_HEAD
            head = self._HEAD.fullmatch(self._head)
            if head is None or head["name"] not in self._names:
                return False
            self.name = head["name"]
        verdict = self._value.take(character)
        if verdict == "wrong":
            return False
        self.arguments.append(character)
        self.ended = verdict == "last"
        return True


def _string(raw: str) -> str | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _object_text(raw: str) -> str | None:
    """The JSON of an object that is given as itself, as a string of JSON, or as null."""
    if raw.startswith("{"):
        return raw
    if raw == "null":
        return "{}"
    text = _string(raw)
    try:
        return text if text is not None and isinstance(json.loads(text), dict) else None
    except (ValueError, RecursionError):
        return None
