"""Models on the Hugging Face hub, through the optional huggingface_hub package."""

from __future__ import annotations

from pathlib import Path

from checkpoints.errors import CheckpointError

HUB_PREFIX = "hf:"
_WANTED = ["*.json", "*.safetensors", "*.jinja"]


def hub_model_name(source: str) -> str:
    """`hf:org/name` -> the last part, which is what the model is called here."""
    parts = source.removeprefix(HUB_PREFIX).split("/")
    if len(parts) != 2 or not all(parts) or any(part in (".", "..") for part in parts):
        raise CheckpointError(
            "not the name of a hub model", expected=f"{HUB_PREFIX}org/name", found=repr(source)
        )
    return parts[1]


def download_snapshot(source: str) -> Path:
    """Download a model into the hub's own cache, or find it there.

    The folder that is returned is called after a commit; the model is called `hub_model_name`.

    Raises:
        CheckpointError: huggingface_hub is not installed, or the download failed.
    """
    hub_model_name(source)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{source} needs the huggingface_hub package",
            remedy="Install it with `pip install 'jaxserve[hf]'`, or download the folder yourself.",
        ) from error
    repository = source.removeprefix(HUB_PREFIX)
    try:
        return Path(snapshot_download(repository, allow_patterns=_WANTED))
    except Exception as error:  # the hub's errors have no root that all its versions share
        raise CheckpointError(
            f"cannot download {source} ({type(error).__name__}: {error})",
            remedy="Check the name, the network, and whether the model needs an access token.",
        ) from error
