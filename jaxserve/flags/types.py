"""From a flag's text to its value; argparse.ArgumentTypeError says what would be right."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:]+\])(:\d{1,5})?")


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def port(text: str) -> int:
    """A TCP port; 0 asks for a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def origins(text: str) -> tuple[str, ...]:
    """Where web pages come from, as browsers write it."""
    found = tuple(text.split(","))
    for origin in found:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise argparse.ArgumentTypeError(
                f"{origin!r} is not an origin such as https://chat.example.org or "
                "http://127.0.0.1:3000, without a path, nor *"
            )
    return found


def seconds(text: str) -> float:
    """A finite number of seconds, not negative."""
    return _number(text, "a number of seconds, 0 or more", 0.0, math.inf)


def gibibytes(text: str) -> float:
    """A finite amount of memory in GiB, 0 included."""
    return _number(text, "a number of GiB, 0 or more", 0.0, math.inf)


def amount(text: str) -> float:
    """A finite number above 0."""
    return _number(text, "a number above 0", 1e-9, math.inf)


def fraction(text: str) -> float:
    """A share above 0 and up to 1."""
    return _number(text, "a share between 0 and 1", 1e-6, 1.0)


def natural(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def milliseconds(text: str) -> float:
    """A number of milliseconds, in seconds."""
    return _number(text, "a number of milliseconds, 0 or more", 0.0, math.inf) / 1e3


def scaled(unit: float) -> Callable[[str], float]:
    """A type for numbers above 0 that are given in this unit."""

    def number(text: str) -> float:
        return _number(text, "a number above 0", 1e-9, math.inf) * unit

    return number


def _number(text: str, expected: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (low <= value <= high and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value
