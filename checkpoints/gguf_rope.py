"""RoPE scaling in a GGUF file: metadata keys, or a tensor with one divisor per frequency."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.gguf_metadata import Metadata
from checkpoints.model_config import Rope
from checkpoints.tensor_files import Array, TensorFiles

_TABLE = "rope_freqs.weight"


def read_rope(metadata: Metadata, architecture: str, head_dim: int, tensors: TensorFiles) -> Rope:
    """The rotary embedding of a file's full-attention layers.

    Raises:
        CheckpointError: a kind of scaling that no model here applies.
    """
    prefix = f"{architecture}.rope"
    default_theta = 1_000_000.0 if architecture == "gemma3" else 10000.0
    rope = Rope(theta=float(metadata.get(f"{prefix}.freq_base", default_theta)))
    if _TABLE in tensors.names():
        original = metadata.get(f"{prefix}.scaling.original_context_length")
        return _from_table(metadata, rope, head_dim, tensors, original)
    kind = metadata.get(f"{prefix}.scaling.type")
    if kind is None and metadata.get(f"{prefix}.scale_linear"):
        kind = "linear"
    if kind in (None, "none"):
        return rope
    if kind != "linear":
        raise CheckpointError(
            "RoPE scaling that is not supported",
            file=metadata.file,
            expected=f"{prefix}.scaling.type none or linear, or a tensor {_TABLE}",
            found=repr(kind),
            remedy="Ignoring it would give wrong answers for long texts.",
        )
    factor = metadata.get(f"{prefix}.scaling.factor", metadata.get(f"{prefix}.scale_linear"))
    if not isinstance(factor, float) or factor <= 0:
        raise CheckpointError(
            f"key {prefix}.scaling.factor", file=metadata.file, expected="> 0", found=factor
        )
    return replace(rope, scaling="linear", factor=factor)


def llama3_divisors(rope: Rope, head_dim: int) -> Array:
    """f32[D/2]: what Llama 3.1's scaling divides each frequency by."""
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = np.clip((rope.original_context / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - kept) / rope.factor + kept)).astype(np.float32)


def _from_table(
    metadata: Metadata, rope: Rope, head_dim: int, tensors: TensorFiles, original: int | None
) -> Rope:
    """The scaling whose divisors these are.

    Converters write the table and drop the parameters. All published models share two of them,
    the third is the original context, and the largest divisor is the factor itself.
    """
    table = tensors.rows(_TABLE, 0, head_dim // 2).astype(np.float32)
    if np.all(table == 1.0):
        return rope
    scaled = replace(
        rope,
        scaling="llama3",
        factor=round(float(table.max()), 3),
        original_context=original or Rope().original_context,
    )
    expected = llama3_divisors(scaled, head_dim)
    if tensors.shape(_TABLE) != expected.shape or not np.allclose(table, expected, rtol=1e-4):
        raise CheckpointError(
            f"tensor {_TABLE} holds a RoPE scaling that is not supported",
            file=metadata.file,
            expected=f"that of Llama 3.1: {np.round(expected[-4:], 4)} at its end",
            found=f"{np.round(table[-4:], 4)}",
            remedy="Ignoring it would give wrong answers for long texts.",
        )
    return scaled
