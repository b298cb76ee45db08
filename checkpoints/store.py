"""Where pulled models are kept, and how its folders are called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MANIFEST_NAME = "jaxserve.json"
"""Written last: a model folder without it is not a model."""


def default_store_path() -> Path:
    """The store in the user's cache folder."""
    return Path.home() / ".cache" / "jaxserve"


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of converted models. Nothing is created before it is needed.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def models(self) -> Path:
        """One folder a model."""
        return self.path / "models"

    @property
    def downloads(self) -> Path:
        """Files on their way to being converted."""
        return self.path / "downloads"

    @property
    def xla_cache(self) -> Path:
        """For jax's compilation cache; nothing in this package uses it."""
        return self.path / "xla-cache"

    def model_folder(self, name: str) -> Path:
        """Where the model of this name is, or would be."""
        return self.models / name

    def holds(self, name: str) -> bool:
        """Whether a model of this name was pulled to the end."""
        return (self.model_folder(name) / MANIFEST_NAME).is_file()
