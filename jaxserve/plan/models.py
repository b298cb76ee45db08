"""Published models that can be planned for without their weights: dimensions from their configs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from checkpoints import CheckpointError, Store, open_checkpoint
from checkpoints.model_config import Family, LayerConfig, ModelConfig, Rope
from jaxserve.errors import ConfigError


def _config(
    family: Family,
    *,
    vocab_size: int,
    width: int,
    mlp_width: int,
    heads: tuple[int, int, int],
    layers: tuple[LayerConfig, ...],
    max_context: int,
    tied_head: bool = False,
) -> ModelConfig:
    """heads: H, K and D. What does not change a size is left at the family's usual value."""
    num_heads, num_kv_heads, head_dim = heads
    is_gemma = family == "gemma3"
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        width=width,
        mlp_width=mlp_width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=layers,
        norm_eps=1e-6 if is_gemma or family == "qwen3" else 1e-5,
        activation="gelu_tanh" if is_gemma else "silu",
        tied_head=tied_head,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norm=is_gemma,
        embed_scale=width**0.5 if is_gemma else 1.0,
        attention_scale=head_dim**-0.5,
        final_softcap=None,
        max_context=max_context,
        bos_id=None,
        eos_ids=(),
    )


def _same(count: int, rope: Rope, window: int | None = None) -> tuple[LayerConfig, ...]:
    return (LayerConfig(window, rope),) * count


def _llama3(count: int, factor: float) -> tuple[LayerConfig, ...]:
    return _same(count, Rope(500_000.0, "llama3", factor, 1.0, 4.0, 8192))


def _gemma3(count: int, window: int, full: Rope) -> tuple[LayerConfig, ...]:
    """Five windowed layers, then one that sees everything, and so on."""
    sliding = LayerConfig(window, Rope(10_000.0))
    return tuple(LayerConfig(None, full) if i % 6 == 5 else sliding for i in range(count))


_SMOLLM2_135M = _config(
    "llama",
    vocab_size=49_152,
    width=576,
    mlp_width=1_536,
    heads=(9, 3, 64),
    layers=_same(30, Rope(100_000.0)),
    max_context=8_192,
    tied_head=True,
)

PLAN_MODELS: Mapping[str, ModelConfig] = {
    "llama-3.1-8b": _config(
        "llama",
        vocab_size=128_256,
        width=4_096,
        mlp_width=14_336,
        heads=(32, 8, 128),
        layers=_llama3(32, 8.0),
        max_context=131_072,
    ),
    "llama-3.2-3b": _config(
        "llama",
        vocab_size=128_256,
        width=3_072,
        mlp_width=8_192,
        heads=(24, 8, 128),
        layers=_llama3(28, 32.0),
        max_context=131_072,
        tied_head=True,
    ),
    "llama-3.2-1b": _config(
        "llama",
        vocab_size=128_256,
        width=2_048,
        mlp_width=8_192,
        heads=(32, 8, 64),
        layers=_llama3(16, 32.0),
        max_context=131_072,
        tied_head=True,
    ),
    "qwen3-8b": _config(
        "qwen3",
        vocab_size=151_936,
        width=4_096,
        mlp_width=12_288,
        heads=(32, 8, 128),
        layers=_same(36, Rope(1_000_000.0)),
        max_context=40_960,
    ),
    "qwen2.5-7b": _config(
        "qwen2",
        vocab_size=152_064,
        width=3_584,
        mlp_width=18_944,
        heads=(28, 4, 128),
        layers=_same(28, Rope(1_000_000.0)),
        max_context=32_768,
    ),
    "mistral-7b": _config(  # version 0.3
        "mistral",
        vocab_size=32_768,
        width=4_096,
        mlp_width=14_336,
        heads=(32, 8, 128),
        layers=_same(32, Rope(1_000_000.0)),
        max_context=32_768,
    ),
    "mistral-7b-v0.1": _config(  # the one with a sliding window
        "mistral",
        vocab_size=32_000,
        width=4_096,
        mlp_width=14_336,
        heads=(32, 8, 128),
        layers=_same(32, Rope(10_000.0), window=4_096),
        max_context=32_768,
    ),
    "gemma-3-4b": _config(  # its language model
        "gemma3",
        vocab_size=262_208,
        width=2_560,
        mlp_width=10_240,
        heads=(8, 4, 256),
        layers=_gemma3(34, 1_024, Rope(1_000_000.0, "linear", 8.0)),
        max_context=131_072,
        tied_head=True,
    ),
    "gemma-3-1b": _config(
        "gemma3",
        vocab_size=262_144,
        width=1_152,
        mlp_width=6_912,
        heads=(4, 1, 256),
        layers=_gemma3(26, 512, Rope(1_000_000.0)),
        max_context=32_768,
        tied_head=True,
    ),
    "gemma-3-270m": _config(
        "gemma3",
        vocab_size=262_144,
        width=640,
        mlp_width=2_048,
        heads=(4, 1, 256),
        layers=_gemma3(18, 512, Rope(1_000_000.0)),
        max_context=32_768,
        tied_head=True,
    ),
    "smollm2-135m": _SMOLLM2_135M,
    "smollm2-135m-instruct": _SMOLLM2_135M,
}


def find_model(name: str, store: Path) -> ModelConfig:
    """A published model by name, or the config of any checkpoint that `serve` would take.

    Raises:
        ConfigError: neither.
    """
    if name in PLAN_MODELS:
        return PLAN_MODELS[name]
    try:
        return open_checkpoint(name, Store(store)).config
    except CheckpointError as error:
        known = ", ".join(PLAN_MODELS)
        raise ConfigError(f"{error} Planned for without a checkpoint: {known}.") from error
