"""A folder as published on Hugging Face: config.json, safetensors, tokenizer files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.checkpoint import PublishedCheckpoint
from checkpoints.families import HF_NAMES
from checkpoints.hf_config import read_hf_config
from checkpoints.hf_tokenizer import read_hf_tokenizer
from checkpoints.tensor_files import Array, SafetensorsFolder, TensorFiles, open_safetensors

# Gemma 3 with vision wraps the language model; the wrapper's own tensors are not text.
_WRAPPERS = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_VISION = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def open_hf_folder(folder: Path, *, name: str | None = None) -> PublishedCheckpoint:
    """Read a folder's config and tokenizer; its weights are mapped when they are loaded.

    Args:
        folder: holds config.json.
        name: of the model; None takes the folder's.

    Raises:
        CheckpointError: the folder holds no model that can be served.
    """
    config = read_hf_config(folder)
    return PublishedCheckpoint(
        name=name or folder.resolve().name,
        config=config,
        tokenizer=read_hf_tokenizer(folder),
        names=HF_NAMES[config.family],
        open_files=partial(_open_files, folder),
    )


def _open_files(folder: Path) -> TensorFiles:
    files = open_safetensors(folder)
    if not any(name.startswith(tuple(_WRAPPERS)) for name in files.names()):
        return files
    published = {_unwrapped(n): n for n in files.names() if not n.startswith(_VISION)}
    return _LanguageModel(files, published)


def _unwrapped(name: str) -> str:
    for wrapper, plain in _WRAPPERS.items():
        if name.startswith(wrapper):
            return plain + name.removeprefix(wrapper)
    return name


@dataclass(frozen=True, slots=True)
class _LanguageModel:
    """The text part of a model with vision, under the names of a model without."""

    files: SafetensorsFolder
    published: dict[str, str]

    def names(self) -> Collection[str]:
        return self.published.keys()

    def file_of(self, name: str) -> str:
        return self.files.file_of(self.published.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files.shape(self.published[name])

    def dtype(self, name: str) -> np.dtype[Any]:
        return self.files.dtype(self.published[name])

    def rows(self, name: str, start: int, stop: int) -> Array:
        return self.files.rows(self.published[name], start, stop)
