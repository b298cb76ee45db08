"""Published weights in, Orbax out and in, and the catalogue of known models.

Knows nothing of the engine. Importing this package does not import jax: only loading and
converting weights does.
"""

from __future__ import annotations

from checkpoints.catalogue import CATALOGUE, DEFAULT_MODEL, CatalogueEntry
from checkpoints.checkpoint import Checkpoint, ProgressFn
from checkpoints.errors import CheckpointError
from checkpoints.listing import ListedModel, list_models
from checkpoints.model_config import LayerConfig, ModelConfig, Rope, TokenizerSpec
from checkpoints.opening import open_checkpoint
from checkpoints.pulling import pull
from checkpoints.store import Store, default_store_path

__all__ = [
    "CATALOGUE",
    "DEFAULT_MODEL",
    "CatalogueEntry",
    "Checkpoint",
    "CheckpointError",
    "LayerConfig",
    "ListedModel",
    "ModelConfig",
    "ProgressFn",
    "Rope",
    "Store",
    "TokenizerSpec",
    "default_store_path",
    "list_models",
    "open_checkpoint",
    "pull",
]
