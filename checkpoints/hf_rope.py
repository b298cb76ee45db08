"""The rotary embedding of a config.json: `rope_theta` and `rope_scaling`, or `rope_parameters`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.model_config import Family, Rope

_LLAMA3_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def ropes(file: Path, values: dict[str, Any], family: Family) -> tuple[Rope, Rope]:
    """The embeddings of full-attention and of sliding-window layers.

    They differ in Gemma 3 only, where the older spelling stretches full-attention layers alone.

    Raises:
        CheckpointError: a kind of scaling that no model here applies.
    """
    theta = float(values.get("rope_theta") or 10000.0)
    parameters = values.get("rope_parameters")
    if parameters is None:
        full = _rope(file, values.get("rope_scaling") or {}, theta)
        if family != "gemma3":
            return full, full
        return full, Rope(theta=float(values.get("rope_local_base_freq", 10000.0)))
    if "full_attention" in parameters or "sliding_attention" in parameters:
        full = _rope(file, parameters.get("full_attention") or {}, theta)
        sliding = parameters.get("sliding_attention") or {}
        return full, _rope(file, sliding, 10000.0 if family == "gemma3" else theta)
    full = _rope(file, parameters, theta)
    if family != "gemma3":
        return full, full
    return full, Rope(theta=float(values.get("rope_local_base_freq", 10000.0)))


def _rope(file: Path, block: dict[str, Any], theta: float) -> Rope:
    theta = float(block.get("rope_theta", theta))
    if block.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            "partial_rotary_factor is not supported",
            file=file,
            expected="1.0 or absent",
            found=block["partial_rotary_factor"],
        )
    # `type` is the spelling of older checkpoints; both mean the same.
    kind = block.get("rope_type", block.get("type", "default"))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, scaling="linear", factor=_value(file, block, "factor"))
    if kind == "llama3":
        factor, low, high, original = (_value(file, block, key) for key in _LLAMA3_KEYS)
        return Rope(theta, "llama3", factor, low, high, int(original))
    raise CheckpointError(
        "RoPE scaling that is not supported",
        file=file,
        expected="rope_type default, linear or llama3",
        found=repr(kind),
        remedy="Ignoring it would give wrong answers for long texts.",
    )


def _value(file: Path, block: dict[str, Any], key: str) -> float:
    value = block.get(key)
    if not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(
            f"RoPE scaling needs {key}", file=file, expected="> 0", found=repr(value)
        )
    return float(value)
