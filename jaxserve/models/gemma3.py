"""Gemma 3 (text): norms before and after each half of a layer, windows on five layers of six,
two RoPE bases. Its (1 + w) norms and scaled embedding are settled when a checkpoint is read."""

from __future__ import annotations

import jax

from checkpoints.model_config import LayerConfig, ModelConfig
from jaxserve.batch import LayerPages
from jaxserve.models.attention import Attend
from jaxserve.models.layers import gated_mlp, linear, rms_norm
from jaxserve.models.llama import Weights, attention


def block(
    config: ModelConfig,
    layer: LayerConfig,
    weights: Weights,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: LayerPages,
    attend: Attend,
) -> tuple[jax.Array, LayerPages]:
    """One layer with sandwich norms: as `llama.block`, plus post_attn_norm and post_mlp_norm."""
    eps = config.norm_eps
    out, pages = attention(config, layer, weights, x, rope, pages, attend)
    x = x + rms_norm(linear(out, weights["o"]), weights["post_attn_norm"], eps)
    norm = (weights["mlp_norm"], eps)
    mlp = gated_mlp(x, weights["gate_up"], weights["down"], config.activation, norm=norm)
    return x + rms_norm(mlp, weights["post_mlp_norm"], eps), pages
