"""The key-value part of a GGUF file, with types checked on the way out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import ReaderField


@dataclass(frozen=True, slots=True)
class Metadata:
    """A file's metadata.

    Attributes:
        file: for messages.
        fields: key -> undecoded value.
    """

    file: Path
    fields: Mapping[str, ReaderField]

    def get(self, key: str, default: Any = None) -> Any:
        """The decoded value; arrays are lists."""
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """The decoded value; CheckpointError if the key is absent."""
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
