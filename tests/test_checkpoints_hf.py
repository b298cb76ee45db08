"""Folders as published on Hugging Face: config, weights, tokenizer."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_toys import copy_folder, read_folder, rewrite_as_single_file

from checkpoints import CheckpointError, Rope, Store, open_checkpoint
from checkpoints.hf_config import read_hf_config
from checkpoints.hf_folder import open_hf_folder

FAMILIES = (
    "llama-tied",
    "llama-untied",
    "llama3-rope-scaled",
    "mistral-window",
    "qwen2-bias",
    "qwen3-qknorm",
    "gemma3-hybrid",
)


def test_importing_the_package_imports_no_device_library():
    code = (
        "import sys, checkpoints; "
        "print([m for m in ('jax', 'flax', 'orbax', 'jaxserve') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_published_tensor_lands_in_its_leaf(tiny, family):
    checkpoint = open_hf_folder(tiny / family)
    config, params = checkpoint.config, checkpoint.load(dtype="float32")
    published = read_folder(tiny / family)
    norm_offset = 1.0 if config.family == "gemma3" else 0.0

    np.testing.assert_array_equal(params["embed"], published["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["norm"], published["model.norm.weight"] + norm_offset)
    assert ("head" in params) == (not config.tied_head) == ("lm_head.weight" in published)
    for i, layer in enumerate(params["layers"]):
        part = {
            name.removeprefix(f"model.layers.{i}."): array
            for name, array in published.items()
            if name.startswith(f"model.layers.{i}.")
        }
        q, k, v = (part[f"self_attn.{x}_proj.weight"] for x in "qkv")
        np.testing.assert_array_equal(layer["qkv"], np.concatenate([q, k, v]))
        gate_up = [part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"]]
        np.testing.assert_array_equal(layer["gate_up"], np.concatenate(gate_up))
        np.testing.assert_array_equal(layer["down"], part["mlp.down_proj.weight"])
        np.testing.assert_array_equal(layer["o"], part["self_attn.o_proj.weight"])
        np.testing.assert_array_equal(
            layer["attn_norm"], part["input_layernorm.weight"] + norm_offset
        )
        assert ("qkv_bias" in layer) == config.qkv_bias
        assert ("q_norm" in layer) == ("k_norm" in layer) == config.qk_norm
        assert ("post_attn_norm" in layer) == ("post_mlp_norm" in layer) == config.sandwich_norm
    num_values = sum(a.size for a in published.values())
    assert sum(leaf.size for leaf in flat(params)) == num_values


def flat(params):
    import jax

    return jax.tree.leaves(params)


def test_weights_come_in_the_asked_type_and_norms_in_float32(tiny):
    params = open_hf_folder(tiny / "qwen3-qknorm").load(dtype="bfloat16")
    layer = params["layers"][0]
    assert {layer[key].dtype.name for key in ("qkv", "o", "gate_up", "down")} == {"bfloat16"}
    assert {layer[key].dtype.name for key in ("attn_norm", "q_norm", "mlp_norm")} == {"float32"}
    assert params["norm"].dtype == "float32"


def test_progress_ends_at_its_total(tiny):
    calls = []
    open_hf_folder(tiny / "llama-tied").load(dtype="float32", progress=lambda *a: calls.append(a))
    assert calls[0][1] == 0
    assert calls[-1][1] == calls[-1][2] > 0


def test_gemma_layers_alternate_windows_and_ropes(tiny):
    config = read_hf_config(tiny / "gemma3-hybrid")
    assert [layer.window for layer in config.layers] == [24] * 5 + [None] + [24]
    assert {layer.rope.theta for layer in config.layers if layer.window} == {10000.0}
    assert config.layers[5].rope.theta == 1_000_000.0
    assert config.embed_scale == 8.0
    assert config.attention_scale == 0.25


def test_older_and_newer_spelling_of_gemma_mean_the_same(tiny, tmp_path):
    older = {
        "rope_parameters": None,
        "layer_types": None,
        "_sliding_window_pattern": None,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10000.0,
    }
    folder = copy_folder(tiny / "gemma3-hybrid", tmp_path / "older", config=older)
    assert read_hf_config(folder) == read_hf_config(tiny / "gemma3-hybrid")


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_llama3_scaling_is_read_in_either_spelling(tiny, tmp_path, key):
    scaling = {
        key: "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    changes = {"rope_scaling": scaling, "rope_theta": 500000.0}
    folder = copy_folder(tiny / "llama3-rope-scaled", tmp_path / "m", config=changes)
    expected = Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    assert {layer.rope for layer in read_hf_config(folder).layers} == {expected}


def test_linear_scaling_stretches_only_full_attention_layers_of_gemma(tiny, tmp_path):
    changes = {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    folder = copy_folder(tiny / "gemma3-hybrid", tmp_path / "m", config=changes)
    layers = read_hf_config(folder).layers
    assert layers[5].rope == Rope(1_000_000.0, "linear", 8.0)
    assert layers[0].rope == Rope(10000.0)


def test_absent_keys_take_the_familys_defaults(tiny, tmp_path):
    absent = dict.fromkeys(["head_dim", "num_key_value_heads", "tie_word_embeddings"])
    folder = copy_folder(tiny / "llama-tied", tmp_path / "llama", config=absent)
    config = read_hf_config(folder)
    assert (config.head_dim, config.num_kv_heads, config.tied_head) == (8, 8, False)
    folder = copy_folder(tiny / "gemma3-hybrid", tmp_path / "gemma", config=absent)
    config = read_hf_config(folder)
    assert (config.head_dim, config.num_kv_heads, config.tied_head) == (256, 4, True)


def test_qwen_windows_start_at_max_window_layers_and_only_if_switched_on(tiny, tmp_path):
    changes = {"layer_types": None, "sliding_window": 24, "max_window_layers": 1}
    off = copy_folder(tiny / "qwen2-bias", tmp_path / "off", config=changes)
    assert [layer.window for layer in read_hf_config(off).layers] == [None] * 3
    changes["use_sliding_window"] = True
    on = copy_folder(tiny / "qwen2-bias", tmp_path / "on", config=changes)
    assert [layer.window for layer in read_hf_config(on).layers] == [None, 24, 24]


def test_mistral_without_a_window_sees_everything(tiny, tmp_path):
    folder = copy_folder(tiny / "mistral-window", tmp_path / "m")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"sliding_window": None}))
    assert [layer.window for layer in read_hf_config(folder).layers] == [None] * 3


def test_end_tokens_come_from_the_generation_config_first(tiny, tmp_path):
    folder = copy_folder(tiny / "llama-tied", tmp_path / "m", config={"eos_token_id": 9})
    assert read_hf_config(folder).eos_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_hf_config(folder).eos_ids == (7, 8)
    (folder / "generation_config.json").unlink()
    assert read_hf_config(folder).eos_ids == (9,)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "mamba"}, ["model_type", "mamba", "qwen3"]),
        ({"hidden_act": "relu"}, ["hidden_act", "relu", "silu"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "linear"]),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, ["dynamic"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, ["low_freq_factor"]),
        ({"hidden_size": None}, ["hidden_size", "None"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "8, 3"]),
    ],
)
def test_what_no_model_here_runs_is_refused(tiny, tmp_path, changes, words):
    folder = copy_folder(tiny / "llama-tied", tmp_path / "m", config=changes)
    with pytest.raises(CheckpointError) as refusal:
        read_hf_config(folder)
    for word in ["config.json", *words]:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    "family, tied, with_head, error",
    [
        pytest.param("llama-tied", True, False, None, id="tied, absent"),
        pytest.param("llama-tied", True, True, None, id="tied, present and equal"),
        pytest.param("llama-untied", False, True, None, id="untied, present"),
        pytest.param("llama-untied", False, False, "lm_head.weight", id="untied, absent"),
        pytest.param("llama-untied", None, False, "lm_head.weight", id="flag missing, absent"),
        pytest.param("llama-untied", True, True, "differs", id="tied, present and different"),
    ],
)
def test_output_head_tied_or_not(tiny, tmp_path, family, tied, with_head, error):
    folder = copy_folder(tiny / family, tmp_path / "m", config={"tie_word_embeddings": tied})
    tensors = read_folder(tiny / family)
    if with_head:
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    else:
        tensors.pop("lm_head.weight", None)
    rewrite_as_single_file(folder, tensors)
    checkpoint = open_hf_folder(folder)
    if error is None:
        params = checkpoint.load(dtype="float32")
        assert ("head" in params) == (not tied)
        return
    with pytest.raises(CheckpointError, match=error):
        checkpoint.load(dtype="float32")


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param(
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            ["model.layers.1.mlp.up_proj.weight", "missing", "(160, 64)"],
            id="missing",
        ),
        pytest.param(
            lambda t: t.update({"model.norm.weight": np.ones(63, np.float32)}),
            ["model.norm.weight", "(64,)", "(63,)"],
            id="wrong shape",
        ),
        pytest.param(
            lambda t: t.update({"model.layers.0.mlp.extra": np.ones(3, np.float32)}),
            ["model.layers.0.mlp.extra", "(3,)"],
            id="left over",
        ),
        pytest.param(
            lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": np.ones(64, np.float32)}),
            ["model.layers.0.self_attn.o_proj.bias"],
            id="a bias the config does not mention",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tiny, tmp_path, change, words):
    folder = copy_folder(tiny / "llama-tied", tmp_path / "m")
    tensors = read_folder(folder)
    change(tensors)
    rewrite_as_single_file(folder, tensors)
    with pytest.raises(CheckpointError) as refusal:
        open_hf_folder(folder).load(dtype="float32")
    for word in words:
        assert word in str(refusal.value)


def test_saved_rotary_tables_are_ignored(tiny, tmp_path):
    folder = copy_folder(tiny / "llama-tied", tmp_path / "m")
    tensors = read_folder(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    rewrite_as_single_file(folder, tensors)
    open_hf_folder(folder).load(dtype="float32")


def test_a_missing_shard_is_named(tiny, tmp_path):
    folder = copy_folder(tiny / "llama-tied", tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors does not exist"):
        open_hf_folder(folder).load(dtype="float32")


def test_an_index_that_names_the_wrong_shard_is_refused(tiny, tmp_path):
    folder = copy_folder(tiny / "llama-tied", tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        open_hf_folder(folder).load(dtype="float32")


@pytest.mark.parametrize("keep", [4, 200, 20_000])
def test_a_truncated_shard_is_refused(tiny, tmp_path, keep):
    folder = copy_folder(tiny / "llama-tied", tmp_path / "m")
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="model-00001-of-00002"):
        open_hf_folder(folder).load(dtype="float32")


def test_gemma_with_vision_loads_its_language_model(tiny, tmp_path):
    source = tiny / "gemma3-hybrid"
    folder = copy_folder(source, tmp_path / "m")
    text_config = json.loads((source / "config.json").read_text())
    wrapper = {"model_type": "gemma3", "text_config": text_config, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(wrapper))
    tensors = {f"language_model.{name}": a for name, a in read_folder(source).items()}
    tensors["vision_tower.patch.weight"] = np.ones((2, 2), np.float32)
    tensors["multi_modal_projector.norm.weight"] = np.ones(2, np.float32)
    rewrite_as_single_file(folder, tensors)
    wrapped, plain = open_hf_folder(folder), open_hf_folder(source)
    assert wrapped.config == plain.config
    for found, expected in zip(
        flat(wrapped.load(dtype="float32")), flat(plain.load(dtype="float32")), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_a_folder_is_called_after_itself_and_may_lack_a_tokenizer(tiny, tmp_path):
    checkpoint = open_checkpoint(str(tiny / "llama-tied"), Store(tmp_path))
    assert checkpoint.name == "llama-tied"
    assert checkpoint.tokenizer is None
    assert dataclasses.is_dataclass(checkpoint)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda p: "no-such-model", ["no-such-model", "smollm2-135m-instruct", "hf:org/name"]),
        (lambda p: "smollm2-135m-instruct", ["jaxserve pull smollm2-135m-instruct"]),
        (lambda p: str(p), ["config.json", "empty folder"]),
        (lambda p: str(touch(p / "weights.bin")), [".bin", ".gguf"]),
        (lambda p: "hf:just-a-name", ["hf:org/name", "hf:just-a-name"]),
    ],
)
def test_a_source_that_is_no_checkpoint_says_what_would_be(tmp_path, make, words):
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(make(tmp_path), Store(tmp_path / "store"))
    for word in words:
        assert word in str(refusal.value)


def touch(path: Path) -> Path:
    path.touch()
    return path
