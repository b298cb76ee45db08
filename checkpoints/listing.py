"""What can be served: the catalogue, and what the store holds."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoints.catalogue import CATALOGUE
from checkpoints.errors import CheckpointError
from checkpoints.manifest import read_manifest
from checkpoints.store import Store


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One line of a list of models.

    Attributes:
        name: to serve it by.
        description: what it is, or where it came from.
        licence: of the weights, where known.
        is_pulled: it is in the store.
        size: bytes in the store if pulled, else bytes to download.
    """

    name: str
    description: str
    licence: str | None
    is_pulled: bool
    size: int


def list_models(store: Store) -> tuple[ListedModel, ...]:
    """The catalogue's models, then others in the store. A damaged one says so."""
    folders = sorted(store.models.iterdir()) if store.models.is_dir() else []
    pulled = [folder.name for folder in folders if store.holds(folder.name)]
    names = list(CATALOGUE) + [name for name in pulled if name not in CATALOGUE]
    return tuple(_listed(name, store) for name in names)


def _listed(name: str, store: Store) -> ListedModel:
    entry = CATALOGUE.get(name)
    description, licence = (entry.description, entry.licence) if entry else ("", None)
    if not store.holds(name):
        assert entry is not None
        return ListedModel(name, description, licence, False, entry.size)
    folder = store.model_folder(name)
    try:
        manifest = read_manifest(folder)
        description, licence = description or f"from {manifest.source}", manifest.licence
    except CheckpointError as error:
        description = f"damaged: {error}"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return ListedModel(name, description, licence, True, size)
