"""A Llama in numpy and float64: no cache, no batch, no jax. What step functions are held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from checkpoints.model_config import ModelConfig


def rms_norm(x: np.ndarray, weight: Any, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """RoPE on [T, heads, D], token t at position t."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** -(np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    turned = (
        first * np.cos(angle) - second * np.sin(angle),
        second * np.cos(angle) + first * np.sin(angle),
    )
    return np.concatenate(turned, axis=-1)


def attention(config: ModelConfig, weights: Any, x: np.ndarray, theta: float) -> np.ndarray:
    heads = (x @ weights["qkv"].T).reshape(len(x), -1, config.head_dim)
    num_q, num_kv = config.num_heads, config.num_kv_heads
    q = rotate(heads[:, :num_q], theta)
    k = rotate(heads[:, num_q : num_q + num_kv], theta).repeat(num_q // num_kv, axis=1)
    v = heads[:, num_q + num_kv :].repeat(num_q // num_kv, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) * config.attention_scale
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", probs, v).reshape(len(x), -1) @ weights["o"].T


def residual_stream(config: ModelConfig, params: Any, tokens: Sequence[int]) -> np.ndarray:
    """f64[L, T, E]: the residual stream after each layer."""
    x = np.asarray(params["embed"], np.float64)[list(tokens)]
    outputs = []
    for layer, jax_weights in zip(config.layers, params["layers"], strict=True):
        weights = {name: np.asarray(w, np.float64) for name, w in jax_weights.items()}
        normed = rms_norm(x, weights["attn_norm"], config.norm_eps)
        x = x + attention(config, weights, normed, layer.rope.theta)
        normed = rms_norm(x, weights["mlp_norm"], config.norm_eps)
        gate, up = np.split(normed @ weights["gate_up"].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights["down"].T
        outputs.append(x)
    return np.stack(outputs)


def log_probs(config: ModelConfig, params: Any, x: np.ndarray) -> np.ndarray:
    """f64[..., V]: of a residual stream [..., E], whichever layer's, through norm and head."""
    logits = rms_norm(x, params["norm"], config.norm_eps) @ np.asarray(params["head"], np.float64).T
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
