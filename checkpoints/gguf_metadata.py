"""What a GGUF file says about its model, with types checked on the way out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Metadata:
    """A file's metadata.

    Attributes:
        file: for messages.
        values: key -> value; arrays are lists.
    """

    file: Path
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` if the key is absent."""
        return self.values.get(key, default)

    def require(self, key: str) -> Any:
        """The value; CheckpointError if the key is absent."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(
                f"key {key} is missing", file=self.file, remedy="Convert the model again."
            )
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number, or an array that repeats one; CheckpointError if it is neither.

        Args:
            default: when the key is absent; None makes it required.
        """
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int):
            raise CheckpointError(
                f"key {key}",
                file=self.file,
                expected="one whole number, the same for every layer",
                found=str(value)[:100],
            )
        return value
