"""What stands beside pulled weights: jaxserve.json and tokenizer.json, read and written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.model_config import LayerConfig, ModelConfig, Rope, TokenizerSpec
from checkpoints.store import MANIFEST_NAME
from checkpoints.tensor_files import read_json

FORMAT_VERSION = 1
TOKENIZER_NAME = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a pulled model is.

    Attributes:
        name: of the model.
        source: what was pulled.
        sha256: of the published file, where the catalogue has it.
        licence: of the weights, where the catalogue has it.
        config: of the model.
        num_leaves: arrays in the parameter tree.
        has_tokenizer: there is a tokenizer.json beside this.
    """

    name: str
    source: str
    sha256: str | None
    licence: str | None
    config: ModelConfig
    num_leaves: int
    has_tokenizer: bool


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write jaxserve.json and have the disk keep it."""
    content = {"format_version": FORMAT_VERSION} | asdict(manifest)
    write_durably(folder / MANIFEST_NAME, json.dumps(content, indent=1))


def write_tokenizer(folder: Path, tokenizer: TokenizerSpec) -> None:
    """Write a TokenizerSpec and have the disk keep it."""
    write_durably(folder / TOKENIZER_NAME, json.dumps(asdict(tokenizer), ensure_ascii=False))


def read_manifest(folder: Path) -> Manifest:
    """Read jaxserve.json.

    Raises:
        CheckpointError: it is missing, damaged, or of another format version.
    """
    file = folder / MANIFEST_NAME
    content = read_json(file)
    version = content.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            "written by another version",
            file=file,
            expected=f"format_version {FORMAT_VERSION}",
            found=version,
            remedy="Delete the folder and pull the model again.",
        )
    try:
        return Manifest(**content | {"config": _config(content["config"])})
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"damaged manifest ({error})",
            file=file,
            remedy="Delete the folder and pull the model again.",
        ) from error


def read_tokenizer(folder: Path) -> TokenizerSpec:
    """Read a TokenizerSpec; CheckpointError if it is missing or damaged."""
    content = read_json(folder / TOKENIZER_NAME)
    try:
        pairs = tuple((name, text) for name, text in content["special_tokens"])
        return TokenizerSpec(**content | {"special_tokens": pairs})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"damaged tokenizer ({error})",
            file=folder / TOKENIZER_NAME,
            remedy="Delete the folder and pull the model again.",
        ) from error


def _config(content: Mapping[str, Any]) -> ModelConfig:
    layers = tuple(
        LayerConfig(layer["window"], Rope(**layer["rope"])) for layer in content["layers"]
    )
    return ModelConfig(**{**content, "layers": layers, "eos_ids": tuple(content["eos_ids"])})


def write_durably(file: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
