"""A GGUF file: its metadata, and its tensors dequantised as they are read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from checkpoints.checkpoint import PublishedCheckpoint
from checkpoints.errors import CheckpointError
from checkpoints.families import GGUF_NAMES
from checkpoints.gguf_config import read_gguf_config
from checkpoints.gguf_format import GgufTensor, read_gguf
from checkpoints.gguf_metadata import Metadata
from checkpoints.gguf_tokenizer import read_gguf_tokenizer
from checkpoints.tensor_files import Array

_PLAIN_DTYPES: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """The tensors of one GGUF file, mapped."""

    file: Path
    tensors: dict[str, GgufTensor]

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def file_of(self, name: str) -> str:
        return str(self.file)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        return _PLAIN_DTYPES.get(self.tensors[name].kind, np.dtype(np.float32))

    def rows(self, name: str, start: int, stop: int) -> Array:
        tensor = self.tensors[name]
        plain = _PLAIN_DTYPES.get(tensor.kind)
        if plain is not None:
            return tensor.data.view(plain)[start:stop]
        # A vector is a single row of blocks, which do not end where its entries do.
        stored = tensor.data[start:stop] if len(tensor.shape) > 1 else tensor.data
        try:
            dequantised: Array = dequantize(stored, tensor.kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"tensor {name} has a quantisation that cannot be read",
                file=self.file,
                expected="one that the gguf package dequantises",
                found=tensor.kind.name,
                remedy="Update the gguf package, or use another quantisation of this model.",
            ) from error
        return dequantised if len(tensor.shape) > 1 else dequantised[start:stop]


def open_gguf(file: Path) -> PublishedCheckpoint:
    """Read a file's config and tokenizer and map its tensors.

    Raises:
        CheckpointError: the file is damaged, or holds a model or tokenizer that cannot be run.
    """
    values, stored = read_gguf(file)
    metadata, tensors = Metadata(file, values), GgufTensors(file, stored)
    if metadata.number("split.count", 1) > 1:
        raise CheckpointError(
            "one part of a split model",
            file=file,
            expected="a single file",
            found=f"{metadata.number('split.count', 1)} parts",
            remedy="Join the parts with `gguf-split --merge` first.",
        )
    config = read_gguf_config(metadata, tensors)
    return PublishedCheckpoint(
        name=file.stem,
        config=config,
        tokenizer=read_gguf_tokenizer(metadata),
        names=GGUF_NAMES[config.family],
        open_files=lambda: tensors,
    )
