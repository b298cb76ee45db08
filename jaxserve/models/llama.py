"""Llama and the families that differ from it by a switch: Mistral (sliding window), Qwen2 (biases
on q, k and v) and Qwen3 (RMSNorm on query and key heads)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.model_config import LayerConfig, ModelConfig
from jaxserve.batch import LayerPages
from jaxserve.models.attention import Attend
from jaxserve.models.layers import gated_mlp, linear, rms_norm

Weights = dict[str, jax.Array]


def block(
    config: ModelConfig,
    layer: LayerConfig,
    weights: Weights,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: LayerPages,
    attend: Attend,
) -> tuple[jax.Array, LayerPages]:
    """One pre-norm transformer layer.

    Args:
        weights: attn_norm [E], qkv [(H + 2K) D, E], o [E, H D], mlp_norm [E], gate_up [2F, E],
            down [E, F]; with qkv_bias also qkv_bias; with qk_norm also q_norm and k_norm [D].
        x: [T, E], the residual stream.
        rope: cos and sin of the step's positions.
    """
    out, pages = attention(config, layer, weights, x, rope, pages, attend)
    x = linear(out, weights["o"], residual=x)
    mlp = (weights["gate_up"], weights["down"], config.activation)
    norm = (weights["mlp_norm"], config.norm_eps)
    return gated_mlp(x, *mlp, norm=norm, residual=x), pages


def attention(
    config: ModelConfig,
    layer: LayerConfig,
    weights: Weights,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    pages: LayerPages,
    attend: Attend,
) -> tuple[jax.Array, LayerPages]:
    """Normalise, project, rotate, attend: what is left is to project back, [T, H D] of x [T, E]."""
    num_tokens = x.shape[0]
    qkv = linear(x, weights["qkv"], norm=(weights["attn_norm"], config.norm_eps))
    if config.qkv_bias:
        qkv = qkv + weights["qkv_bias"][None]
    heads = qkv.reshape(num_tokens, -1, config.head_dim)  # [T, H + 2K, D]
    q, k, v = jnp.split(heads, (config.num_heads, config.num_heads + config.num_kv_heads), axis=1)
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"], config.norm_eps)
        k = rms_norm(k, weights["k_norm"], config.norm_eps)
    scale, window = config.attention_scale, layer.window
    out, pages = attend(q, k, v, pages, scale=scale, window=window, rope=rope)
    return out.reshape(num_tokens, -1), pages


Params = dict[str, Any]
"""`embed`, `norm`, perhaps `head`, and `layers`: L times `Weights`."""
