"""The one error that loading, converting or fetching a checkpoint raises on purpose."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint cannot be used as it stands.

    The message names the file, the tensor or key, what was expected and what was found, and
    what to do about it where something can be done.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: object = None,
        expected: object = None,
        found: object = None,
        remedy: str = "",
    ) -> None:
        parts = [f"{file}: {problem}" if file is not None else problem]
        if expected is not None:
            parts.append(f"expected {expected}")
        if found is not None:
            parts.append(f"found {found}")
        message = ", ".join(parts)
        super().__init__(f"{message}. {remedy}" if remedy else message)
