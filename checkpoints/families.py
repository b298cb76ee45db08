"""How each family's published tensor names map to the parameter tree that the models consume.

To add a family: its spelling in safetensors (`HF_NAMES`), and in GGUF if it has one (`GGUF_NAMES`).
Shapes follow from the ModelConfig, so a table holds names only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from checkpoints.model_config import Family, ModelConfig


@dataclass(frozen=True, slots=True)
class Names:
    """One family's spelling in one file format.

    Attributes:
        top: our name of a tensor outside the layers -> the published one.
        layer: our name of a tensor of layer i -> the published one, with `{i}`.
        ignored: endings of published tensors that hold nothing a forward pass needs.
        norm_offset: added to every norm weight as it is loaded (Gemma publishes w, applies 1 + w).
        permuted: q and k rows are stored in the order of an interleaved RoPE, head by head.
    """

    top: Mapping[str, str]
    layer: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    norm_offset: float = 0.0
    permuted: bool = False


_HF_TOP = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_HF_LAYER = {
    "attn_norm": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "o": "model.layers.{i}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
}
# Older checkpoints saved the table of inverse frequencies; it follows from the config.
_HF_LLAMA = Names(_HF_TOP, _HF_LAYER, ignored=("rotary_emb.inv_freq",))
_HF_GEMMA3 = replace(
    _HF_LLAMA,
    layer=_HF_LAYER
    | {
        "post_attn_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
        "post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
    },
    norm_offset=1.0,
)

HF_NAMES: Mapping[Family, Names] = {
    "llama": _HF_LLAMA,
    "mistral": _HF_LLAMA,
    "qwen2": _HF_LLAMA,
    "qwen3": _HF_LLAMA,
    "gemma3": _HF_GEMMA3,
}

_GGUF_TOP = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
}
_GGUF_LAYER = {
    "attn_norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "q_bias": "blk.{i}.attn_q.bias",
    "k_bias": "blk.{i}.attn_k.bias",
    "v_bias": "blk.{i}.attn_v.bias",
    "q_norm": "blk.{i}.attn_q_norm.weight",
    "k_norm": "blk.{i}.attn_k_norm.weight",
    "o": "blk.{i}.attn_output.weight",
    "post_attn_norm": "blk.{i}.post_attention_norm.weight",
    "mlp_norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
    "post_mlp_norm": "blk.{i}.post_ffw_norm.weight",
}
# rope_freqs.weight is not lost: gguf_config reads it into the Rope.
_GGUF = Names(_GGUF_TOP, _GGUF_LAYER, ignored=("rope_freqs.weight",))

# Converters reorder q and k for the architecture called "llama" (Mistral's files say so too),
# and add Gemma's 1 to the norms.
GGUF_NAMES: Mapping[Family, Names] = {
    "llama": replace(_GGUF, permuted=True),
    "mistral": replace(_GGUF, permuted=True),
    "qwen2": _GGUF,
    "qwen3": _GGUF,
    "gemma3": _GGUF,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One published tensor, as part of a leaf.

    Attributes:
        name: its published name.
        shape: what it must be.
        heads: attention heads its rows belong to if those rows are permuted, else 0.
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the parameter tree: published tensors, stacked along the first axis.

    Attributes:
        path: keys and layer number, as ("layers", 3, "qkv").
        parts: in the order of the rows.
        is_norm: a float32 multiplier whatever type the weights are loaded in.
    """

    path: tuple[str | int, ...]
    parts: tuple[Part, ...]
    is_norm: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(part.shape[0] for part in self.parts)
        return (rows, *self.parts[0].shape[1:])


def leaves_of(config: ModelConfig, names: Names) -> tuple[Leaf, ...]:
    """Every leaf of a model's parameter tree, and the published tensors that make it up."""
    v, e = config.vocab_size, config.width
    leaves = [
        Leaf(("embed",), (Part(names.top["embed"], (v, e)),)),
        Leaf(("norm",), (Part(names.top["norm"], (e,)),), is_norm=True),
    ]
    if not config.tied_head:
        leaves.append(Leaf(("head",), (Part(names.top["head"], (v, e)),)))
    for i in range(config.num_layers):
        leaves.extend(_layer_leaves(config, names, i))
    return tuple(leaves)


def _layer_leaves(config: ModelConfig, names: Names, i: int) -> list[Leaf]:
    h, k, d = config.num_heads, config.num_kv_heads, config.head_dim
    e, f = config.width, config.mlp_width

    def leaf(key: str, **shapes: tuple[int, ...]) -> Leaf:
        heads = {"q": h, "k": k} if names.permuted else {}
        parts = tuple(
            Part(names.layer[part].format(i=i), shape, heads.get(part.removesuffix("_bias"), 0))
            for part, shape in shapes.items()
        )
        return Leaf(("layers", i, key), parts, is_norm=key.endswith("_norm"))

    leaves = [leaf("attn_norm", attn_norm=(e,))]
    leaves.append(leaf("qkv", q=(h * d, e), k=(k * d, e), v=(k * d, e)))
    if config.qkv_bias:
        leaves.append(leaf("qkv_bias", q_bias=(h * d,), k_bias=(k * d,), v_bias=(k * d,)))
    if config.qk_norm:
        leaves += [leaf("q_norm", q_norm=(d,)), leaf("k_norm", k_norm=(d,))]
    leaves.append(leaf("o", o=(e, h * d)))
    if config.sandwich_norm:
        leaves.append(leaf("post_attn_norm", post_attn_norm=(e,)))
    leaves.append(leaf("mlp_norm", mlp_norm=(e,)))
    leaves.append(leaf("gate_up", gate=(f, e), up=(f, e)))
    leaves.append(leaf("down", down=(e, f)))
    if config.sandwich_norm:
        leaves.append(leaf("post_mlp_norm", post_mlp_norm=(e,)))
    return leaves
