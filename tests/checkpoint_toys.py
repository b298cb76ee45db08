"""Published files made by hand: folders with a change, and GGUF files the way converters write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
from gguf.quants import quantize
from safetensors.flax import load_file, save_file

Tensors = dict[str, np.ndarray]

GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_LAYER_NAMES = GGUF_LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GGUF_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def read_folder(folder: Path) -> Tensors:
    """Every tensor of a folder in float32, through safetensors' own reader."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {name: np.asarray(a, np.float32) for name, a in load_file(file).items()}
    return tensors


def copy_folder(source: Path, target: Path, *, config: Mapping[str, Any] | None = None) -> Path:
    """Copy a checkpoint; `config` changes keys of its config.json, None removes one."""
    shutil.copytree(source, target)
    content = json.loads((target / "config.json").read_text()) | dict(config or {})
    kept = {key: value for key, value in content.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept))
    return target


def rewrite_as_single_file(folder: Path, tensors: Tensors) -> None:
    """Replace a folder's shards and index by one file of these tensors."""
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)
    save_file(
        {name: jax.numpy.asarray(a) for name, a in tensors.items()}, folder / "model.safetensors"
    )


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order in which the standard converter writes q and k of Llama models."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(folder: Path, architecture: str) -> Tensors:
    """A folder's tensors under the names, and in the order, of a GGUF file."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    layer_names = GEMMA_LAYER_NAMES if architecture == "gemma3" else GGUF_LAYER_NAMES
    renamed: Tensors = {}
    for name, array in read_folder(folder).items():
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, layer, key = stem.split(".", 3)
            stem = f"blk.{layer}.{layer_names[key]}"
            if architecture == "llama" and key in ("self_attn.q_proj", "self_attn.k_proj"):
                array = permute(array, heads[key.removeprefix("self_attn.")[0]])
        else:
            stem = GGUF_TOP_NAMES[stem]
        if architecture == "gemma3" and "norm" in stem:
            array = array + 1
        renamed[f"{stem}.{kind}"] = array
    return renamed


def write_gguf(
    file: Path,
    architecture: str,
    folder: Path,
    *,
    tensors: Tensors | None = None,
    metadata: Mapping[str, Any] | None = None,
    quantisation: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Write a folder's model as a GGUF file.

    Args:
        tensors: instead of `gguf_tensors`.
        metadata: more keys; int, float, str, bool or a list of one of them.
        quantisation: of the matrices; None leaves float32.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", config["bos_token_id"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", config["eos_token_id"])
    for key, value in (metadata or {}).items():
        add_value(writer, key, value)
    for name, array in (gguf_tensors(folder, architecture) if tensors is None else tensors).items():
        if quantisation is not None and array.ndim == 2:
            writer.add_tensor(name, quantize(array, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a metadata key in the GGUF type that fits a Python value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
