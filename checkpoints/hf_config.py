"""A Hugging Face config.json -> ModelConfig, in the older and the newer spelling.

Where a key is absent the value is the one that transformers would use for that family.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.hf_rope import ropes
from checkpoints.model_config import Activation, Family, LayerConfig, ModelConfig
from checkpoints.tensor_files import read_json

_FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
    },
    "gemma3": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}
_REFUSED: dict[str, str] = {
    "attention_bias": "a bias on the attention output",
    "mlp_bias": "biases in the MLP",
    "attn_logit_softcapping": "capped attention scores",
    "use_bidirectional_attention": "bidirectional attention",
    "quantization_config": "this quantisation; use a plain or a GGUF checkpoint",
}


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of one config.json over the defaults of its family."""

    file: Path
    values: dict[str, Any]

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def number(self, key: str) -> int:
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"key {key}", file=self.file, expected=">= 1", found=repr(value))
        return value


def read_hf_config(folder: Path) -> ModelConfig:
    """Read config.json and, for the end-of-sequence tokens, generation_config.json.

    Raises:
        CheckpointError: an architecture, activation or switch that no model here runs, or a key
            that is missing or makes no sense.
    """
    file = folder / "config.json"
    raw = _text_config(read_json(file))
    family = _family(file, raw)
    keys = _Keys(file, _DEFAULTS[family] | raw)
    _refuse_unsupported(keys)

    heads, kv_heads, head_dim = _head_sizes(keys)
    width = keys.number("hidden_size")
    is_gemma = family == "gemma3"
    score_width = keys.number("query_pre_attn_scalar") if is_gemma else head_dim
    bos_ids = _token_ids(keys.get("bos_token_id"))
    return ModelConfig(
        family=family,
        vocab_size=keys.number("vocab_size"),
        width=width,
        mlp_width=keys.number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=_layers(keys, family),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=_activation(keys, is_gemma),
        tied_head=bool(keys.get("tie_word_embeddings")),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norm=is_gemma,
        embed_scale=width**0.5 if is_gemma else 1.0,
        attention_scale=score_width**-0.5,
        final_softcap=keys.get("final_logit_softcapping") if is_gemma else None,
        max_context=keys.number("max_position_embeddings"),
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=_eos_ids(folder, keys),
    )


def _head_sizes(keys: _Keys) -> tuple[int, int, int]:
    """Query heads, key-value heads and head_dim."""
    heads = keys.number("num_attention_heads")
    kv_heads, head_dim = heads, keys.number("hidden_size") // heads
    if keys.get("num_key_value_heads") is not None:
        kv_heads = keys.number("num_key_value_heads")
    if keys.get("head_dim") is not None:
        head_dim = keys.number("head_dim")
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            "heads cannot be grouped",
            file=keys.file,
            expected="num_attention_heads a multiple of num_key_value_heads, an even head_dim",
            found=f"{heads}, {kv_heads} and head_dim {head_dim}",
        )
    return heads, kv_heads, head_dim


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Of Gemma 3 with vision, the language model; anything else as it is."""
    if raw.get("model_type") != "gemma3" or not isinstance(raw.get("text_config"), dict):
        return raw
    text_config: dict[str, Any] = raw["text_config"]
    shared = {key: raw[key] for key in ("bos_token_id", "eos_token_id") if key in raw}
    return {"model_type": "gemma3_text"} | shared | text_config


def _family(file: Path, raw: dict[str, Any]) -> Family:
    family = _FAMILIES.get(raw.get("model_type", ""))
    if family is None:
        raise CheckpointError(
            "architecture that is not supported",
            file=file,
            expected="model_type one of " + ", ".join(_FAMILIES),
            found=repr(raw.get("model_type")),
        )
    return family


def _refuse_unsupported(keys: _Keys) -> None:
    for key, meaning in _REFUSED.items():
        if keys.get(key):
            raise CheckpointError(
                f"{key} asks for {meaning}, which is not supported",
                file=keys.file,
                expected=f"{key} to be absent, false or null",
                found=repr(keys.get(key)),
            )


def _activation(keys: _Keys, is_gemma: bool) -> Activation:
    key = "hidden_activation" if is_gemma else "hidden_act"
    name = keys.get(key) or "silu"
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"{key} is not supported",
            file=keys.file,
            expected="one of " + ", ".join(_ACTIVATIONS),
            found=repr(name),
        )
    return _ACTIVATIONS[name]


def _layers(keys: _Keys, family: Family) -> tuple[LayerConfig, ...]:
    sliding = _sliding(keys, family)
    window = keys.number("sliding_window") if any(sliding) else None
    full_rope, sliding_rope = ropes(keys.file, keys.values, family)
    return tuple(
        LayerConfig(window, sliding_rope) if slides else LayerConfig(None, full_rope)
        for slides in sliding
    )


def _sliding(keys: _Keys, family: Family) -> tuple[bool, ...]:
    """For each layer, whether it has a sliding window."""
    count = keys.number("num_hidden_layers")
    if family == "llama":
        return (False,) * count
    types = keys.get("layer_types")
    if types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        if len(types) != count or not known.keys() >= set(types):
            raise CheckpointError(
                "layer_types",
                file=keys.file,
                expected=f"{count} of " + " or ".join(known),
                found=types,
            )
        return tuple(known[kind] for kind in types)
    if family == "gemma3":
        pattern = keys.get("sliding_window_pattern") or keys.get("_sliding_window_pattern") or 6
        return tuple((i + 1) % pattern != 0 for i in range(count))
    if keys.get("sliding_window") is None:
        return (False,) * count
    if family == "mistral":
        return (True,) * count
    if not keys.get("use_sliding_window"):
        return (False,) * count
    first = keys.values.get("max_window_layers", 28)
    return tuple(i >= first for i in range(count))


def _eos_ids(folder: Path, keys: _Keys) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    if generation.exists():
        eos_ids = _token_ids(read_json(generation).get("eos_token_id"))
        if eos_ids:
            return eos_ids
    return _token_ids(keys.get("eos_token_id"))


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
