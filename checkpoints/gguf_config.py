"""GGUF metadata -> ModelConfig."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoints.errors import CheckpointError
from checkpoints.gguf_metadata import Metadata
from checkpoints.gguf_rope import read_rope
from checkpoints.model_config import Family, LayerConfig, ModelConfig, Rope
from checkpoints.tensor_files import TensorFiles

_FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
}

# What transformers' and llama.cpp's Gemma 3 assume where the file says nothing.
_GEMMA3_WINDOW_PATTERN = 6
_GEMMA3_LOCAL_THETA = 10000.0
_GEMMA3_27B_LAYERS = 62

# Tokens that end a turn. Many chat models' files name only one end token in their metadata.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")


@dataclass(frozen=True, slots=True)
class _Keys:
    """Metadata keys that start with the architecture's name."""

    metadata: Metadata
    architecture: str

    def number(self, key: str, default: int | None = None) -> int:
        return self.metadata.number(f"{self.architecture}.{key}", default)


def read_gguf_config(metadata: Metadata, tensors: TensorFiles) -> ModelConfig:
    """Work out a model's dimensions.

    Args:
        metadata: of the file.
        tensors: of the file: some things show only in which tensors there are.

    Raises:
        CheckpointError: an architecture or a switch that no model here runs.
    """
    architecture, family = _family(metadata)
    keys = _Keys(metadata, architecture)
    width, heads = keys.number("embedding_length"), keys.number("attention.head_count")
    head_dim = _head_dim(keys, width // heads)
    layers = _layers(keys, family, read_rope(metadata, architecture, head_dim, tensors))
    is_gemma = family == "gemma3"
    # The 27B model alone scales scores by the width per head instead of head_dim.
    score_width = width // heads if is_gemma and len(layers) == _GEMMA3_27B_LAYERS else head_dim
    return ModelConfig(
        family="mistral" if family == "llama" and layers[0].window else family,
        vocab_size=_vocab_size(metadata, tensors),
        width=width,
        mlp_width=keys.number("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=keys.number("attention.head_count_kv", heads),
        head_dim=head_dim,
        layers=layers,
        norm_eps=_tidy(metadata.require(f"{architecture}.attention.layer_norm_rms_epsilon")),
        activation="gelu_tanh" if is_gemma else "silu",
        tied_head="output.weight" not in tensors.names(),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norm=is_gemma,
        embed_scale=width**0.5 if is_gemma else 1.0,
        attention_scale=score_width**-0.5,
        final_softcap=metadata.get(f"{architecture}.final_logit_softcapping") or None,
        max_context=keys.number("context_length"),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=_eos_ids(metadata),
    )


def _family(metadata: Metadata) -> tuple[str, Family]:
    architecture = metadata.require("general.architecture")
    if architecture not in _FAMILIES:
        raise CheckpointError(
            "architecture that is not supported",
            file=metadata.file,
            expected="one of " + ", ".join(_FAMILIES),
            found=repr(architecture),
        )
    if metadata.number(f"{architecture}.expert_count", 0):
        raise CheckpointError(
            "mixture of experts is not supported",
            file=metadata.file,
            expected=f"{architecture}.expert_count to be absent or 0",
            found=metadata.number(f"{architecture}.expert_count"),
        )
    return architecture, _FAMILIES[architecture]


def _head_dim(keys: _Keys, default: int) -> int:
    head_dim = keys.number("attention.key_length", default)
    value_dim = keys.number("attention.value_length", head_dim)
    rotated = keys.number("rope.dimension_count", head_dim)
    if not head_dim == value_dim == rotated:
        raise CheckpointError(
            "heads that are not supported",
            file=keys.metadata.file,
            expected=f"value and rotated dimensions to equal the key's {head_dim}",
            found=f"{value_dim} and {rotated}",
        )
    return head_dim


def _vocab_size(metadata: Metadata, tensors: TensorFiles) -> int:
    if "token_embd.weight" not in tensors.names():
        raise CheckpointError("tensor token_embd.weight is missing", file=metadata.file)
    return tensors.shape("token_embd.weight")[0]


def _layers(keys: _Keys, family: Family, rope: Rope) -> tuple[LayerConfig, ...]:
    count = keys.number("block_count")
    window = keys.number("attention.sliding_window", 0) or None
    if family == "gemma3":
        if window is None:
            keys.metadata.require("gemma3.attention.sliding_window")
        theta = keys.metadata.get("gemma3.rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
        local, everything = LayerConfig(window, Rope(theta=theta)), LayerConfig(None, rope)
        return tuple(local if slides else everything for slides in _sliding(keys, count))
    # Only Mistral's files, which call themselves llama, mean a window for every layer.
    return (LayerConfig(window if family == "llama" else None, rope),) * count


def _sliding(keys: _Keys, count: int) -> tuple[bool, ...]:
    pattern = keys.metadata.get(
        f"{keys.architecture}.attention.sliding_window_pattern", _GEMMA3_WINDOW_PATTERN
    )
    if isinstance(pattern, list):
        if len(pattern) != count:
            raise CheckpointError(
                "gemma3.attention.sliding_window_pattern",
                file=keys.metadata.file,
                expected=f"{count} entries",
                found=len(pattern),
            )
        return tuple(bool(slides) for slides in pattern)
    return tuple((i + 1) % pattern != 0 for i in range(count))


def _eos_ids(metadata: Metadata) -> tuple[int, ...]:
    names = ("eos", "eot", "eom")
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    if metadata.get("tokenizer.chat_template"):
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        ids += [i for i, token in enumerate(tokens) if token in _TURN_ENDS]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _tidy(value: float) -> float:
    """1e-05 for 9.999999747378752e-06: the number that was written before it became a float32."""
    return float(f"{value:.6g}")
