"""What a checkpoint says about its model, in one spelling whatever the file format.

Plain data, no jax: the server process reads it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of one layer.

    Attributes:
        theta: base of the geometric series of frequencies.
        scaling: "default" leaves the frequencies alone, "linear" divides all of them by
            `factor`, "llama3" divides the slow ones and blends in between (Llama 3.1 release).
        factor: stretch of the context, >= 1.
        low_freq_factor: llama3: wavelengths above original_context / low_freq_factor are stretched.
        high_freq_factor: llama3: wavelengths below original_context / high_freq_factor are kept.
        original_context: llama3: context length of pre-training, in tokens.
    """

    theta: float = 10000.0
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """How the attention of one layer differs from its neighbours'.

    Attributes:
        window: tokens a query sees, itself included (sliding window). None sees everything.
        rope: its position embedding.
    """

    window: int | None
    rope: Rope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions and switches of a decoder language model.

    Attributes:
        family: which file of `jaxserve/models` runs it, which table of `checkpoints` loads it.
        vocab_size: V, rows of the embedding.
        width: E, size of the residual stream.
        mlp_width: F.
        num_heads: H, query heads.
        num_kv_heads: K, key and value heads; H is a multiple of K.
        head_dim: D.
        layers: one entry per layer; its length is L.
        norm_eps: added to the mean square in RMSNorm.
        activation: of the gated MLP.
        tied_head: the output head is the embedding matrix.
        qkv_bias: q, k and v projections add a bias.
        qk_norm: RMSNorm over D of every query and key head before RoPE.
        sandwich_norm: a second RMSNorm after attention and after the MLP (Gemma 3).
        embed_scale: factor on embedding rows (Gemma: sqrt(E)), else 1.
        attention_scale: factor on q.k, usually D ** -0.5.
        final_softcap: c in c * tanh(logits / c), or None.
        max_context: tokens (prompt and output) the model was made for.
        bos_id: beginning-of-sequence token, or None.
        eos_ids: tokens that end a generation, from generation_config first.
    """

    family: Family
    vocab_size: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    activation: Activation
    tied_head: bool
    qkv_bias: bool
    qk_norm: bool
    sandwich_norm: bool
    embed_scale: float
    attention_scale: float
    final_softcap: float | None
    max_context: int
    bos_id: int | None
    eos_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """Everything needed to turn text into ids and back; serialisable, no file handles.

    Attributes:
        tokenizer_json: the `tokenizers` library's own JSON format. Its post-processor adds no
            special tokens: BOS is ours to add, exactly once.
        add_bos: a plain text prompt starts with `bos_token`.
        bos_token: its text, or None. Chat templates refer to it.
        eos_token: its text, or None.
        chat_template: jinja2 source, or None for a base model.
        special_tokens: other named special tokens a template may refer to (pad_token, unk_token).
        tool_template: jinja2 source for chats with tools, where they have one of their own.
    """

    tokenizer_json: str
    add_bos: bool
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    special_tokens: tuple[tuple[str, str], ...] = ()
    tool_template: str | None = None
