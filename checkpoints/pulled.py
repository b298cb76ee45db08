"""A model folder that `pull` wrote: jaxserve.json, tokenizer.json and Orbax params."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from checkpoints.checkpoint import ProgressFn, no_progress
from checkpoints.errors import CheckpointError
from checkpoints.families import HF_NAMES, Leaf, leaves_of
from checkpoints.manifest import Manifest, read_manifest, read_tokenizer
from checkpoints.model_config import ModelConfig, TokenizerSpec

if TYPE_CHECKING:
    import jax

    from checkpoints.placing import Params

PARAMS_NAME = "params"


@dataclass(frozen=True, slots=True)
class PulledCheckpoint:
    """Weights in Orbax's format, already fused. See Checkpoint for the attributes."""

    folder: Path
    manifest: Manifest
    tokenizer: TokenizerSpec | None

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def config(self) -> ModelConfig:
        return self.manifest.config

    def load(
        self,
        *,
        dtype: npt.DTypeLike,
        sharding: jax.sharding.Sharding | None = None,
        progress: ProgressFn | None = None,
    ) -> Params:
        """Restore every leaf straight into its type and place."""
        from checkpoints.orbax_io import restore_params

        report = progress or no_progress
        leaves = canonical_leaves(self.config)
        report("restoring weights", 0, len(leaves))
        params = restore_params(self.folder / PARAMS_NAME, leaves, np.dtype(dtype), sharding)
        report("restoring weights", len(leaves), len(leaves))
        return params


def open_pulled(folder: Path) -> PulledCheckpoint:
    """Open a folder that holds jaxserve.json.

    Raises:
        CheckpointError: the folder is damaged or of another version.
    """
    manifest = read_manifest(folder)
    if not (folder / PARAMS_NAME).is_dir():
        raise CheckpointError(
            f"no {PARAMS_NAME} folder beside the manifest",
            file=folder,
            remedy="Delete the folder and pull the model again.",
        )
    expected = len(canonical_leaves(manifest.config))
    if manifest.num_leaves != expected:
        raise CheckpointError(
            "number of arrays",
            file=folder,
            expected=f"{expected} for this config",
            found=manifest.num_leaves,
            remedy="Delete the folder and pull the model again.",
        )
    return PulledCheckpoint(
        folder, manifest, read_tokenizer(folder) if manifest.has_tokenizer else None
    )


def canonical_leaves(config: ModelConfig) -> tuple[Leaf, ...]:
    """The leaves of a model's tree; their published names do not matter here."""
    return leaves_of(config, HF_NAMES[config.family])
