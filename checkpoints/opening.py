"""From what a user calls a model to an opened checkpoint."""

from __future__ import annotations

from pathlib import Path

from checkpoints.catalogue import CATALOGUE
from checkpoints.checkpoint import Checkpoint, PublishedCheckpoint
from checkpoints.errors import CheckpointError
from checkpoints.gguf_file import open_gguf
from checkpoints.hf_folder import open_hf_folder
from checkpoints.hf_hub import HUB_PREFIX, download_snapshot, hub_model_name
from checkpoints.pulled import open_pulled
from checkpoints.store import MANIFEST_NAME, Store


def open_checkpoint(source: str, store: Store) -> Checkpoint:
    """Open a model for serving. Reads its config and tokenizer, no weights.

    Args:
        source: a name in the catalogue or the store, a folder with config.json, a .gguf file, a
            folder that `pull` wrote, or `hf:org/name`. A catalogue name goes before a folder of
            that name; write `./name` for the folder.
        store: where pulled models are.

    Raises:
        CheckpointError: nothing is there, it has not been pulled, or it cannot be used.
    """
    name = hub_model_name(source) if source.startswith(HUB_PREFIX) else source
    if _is_model_name(name) and store.holds(name):
        return open_pulled(store.model_folder(name))
    if source in CATALOGUE:
        raise CheckpointError(
            f"model {source} has not been pulled into {store.path}",
            remedy=f"Run `jaxserve pull {source}` first.",
        )
    path = Path(source).expanduser()
    if (path / MANIFEST_NAME).is_file():
        return open_pulled(path)
    return open_published(source)


def open_published(source: str) -> PublishedCheckpoint:
    """Open a folder with config.json, a .gguf file, or `hf:org/name` (downloading it)."""
    if source.startswith(HUB_PREFIX):
        return open_hf_folder(download_snapshot(source), name=hub_model_name(source))
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return open_gguf(path)
    if (path / "config.json").is_file():
        return open_hf_folder(path)
    if path.exists():
        raise CheckpointError(
            "not a checkpoint",
            file=path,
            expected=f"a .gguf file, or a folder with config.json or {MANIFEST_NAME}",
            found=_description(path),
        )
    raise CheckpointError(
        f"no model {source!r}",
        expected=f"one of {', '.join(CATALOGUE)}; a folder, a .gguf file or {HUB_PREFIX}org/name",
        found="no such file or folder",
    )


def _is_model_name(name: str) -> bool:
    return bool(name) and Path(name).name == name


def _description(path: Path) -> str:
    if path.is_file():
        return f"a file that ends in {path.suffix or 'nothing'}"
    names = sorted(entry.name for entry in path.iterdir())
    return f"a folder with {', '.join(names[:5])}" if names else "an empty folder"
