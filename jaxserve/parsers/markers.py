"""How much of a text may still become a marker."""

from __future__ import annotations


def held_back(text: str, marker: str) -> int:
    """Characters at the end of `text` that are white space and then a beginning of `marker`.

    White space belongs to them because it is dropped in front of a marker. `text` does not contain
    `marker` itself.
    """
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            text = text[:-length]
            break
    else:
        length = 0
    return length + len(text) - len(text.rstrip())
