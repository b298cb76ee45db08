"""GGUF files, written here the way converters write them, against the folders they came from."""

from __future__ import annotations

import math
import struct

import gguf
import jax
import numpy as np
import pytest
from checkpoint_toys import GGUF_LAYER_NAMES, gguf_tensors, permute, write_gguf
from gguf.quants import dequantize, quantize

from checkpoints import CheckpointError, Rope, Store, open_checkpoint
from checkpoints.gguf_file import GgufTensors, open_gguf
from checkpoints.gguf_format import read_gguf
from checkpoints.gguf_rope import llama3_divisors
from checkpoints.hf_folder import open_hf_folder

GEMMA = {"gemma3.attention.sliding_window": 24, "gemma3.rope.freq_base": 1_000_000.0}
CASES = [
    pytest.param("llama-tied", "llama", {}, id="llama-tied"),
    pytest.param("llama-untied", "llama", {"llama.rope.freq_base": 500000.0}, id="llama-untied"),
    pytest.param("mistral-window", "llama", {"llama.attention.sliding_window": 24}, id="mistral"),
    pytest.param("qwen2-bias", "qwen2", {}, id="qwen2"),
    pytest.param("qwen3-qknorm", "qwen3", {}, id="qwen3"),
    pytest.param("gemma3-hybrid", "gemma3", GEMMA, id="gemma3"),
]


def assert_same_tree(found, expected, **tolerance):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, **({"rtol": 0, "atol": 0} | tolerance))


@pytest.mark.parametrize("family, architecture, metadata", CASES)
def test_a_gguf_file_holds_the_same_model_as_its_folder(
    tiny, tmp_path, family, architecture, metadata
):
    file = write_gguf(tmp_path / "m.gguf", architecture, tiny / family, metadata=metadata)
    converted, original = open_gguf(file), open_hf_folder(tiny / family)
    assert converted.config == original.config
    # Adding Gemma's 1 before or after the float32 rounding may differ in the last bit.
    tolerance = {"atol": 1e-6} if architecture == "gemma3" else {}
    assert_same_tree(converted.load(dtype="float32"), original.load(dtype="float32"), **tolerance)


def test_q_and_k_rows_are_put_back_with_their_own_number_of_heads():
    """8 query and 2 key heads: undoing k with the query heads would be wrong, and silent."""
    from checkpoints.leaves import _unpermute

    k = np.arange(2 * 16 * 3, dtype=np.float32).reshape(32, 3)
    np.testing.assert_array_equal(_unpermute(permute(k, 2), 2), k)
    assert not np.array_equal(_unpermute(permute(k, 2), 8), k)
    bias = np.arange(32, dtype=np.float32)
    np.testing.assert_array_equal(_unpermute(permute(bias, 2), 2), bias)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_quantised_matrices_are_dequantised_before_they_are_reordered(tiny, tmp_path, kind):
    quantisation = gguf.GGMLQuantizationType[kind]
    folder = tiny / "llama-tied"
    file = write_gguf(tmp_path / "m.gguf", "llama", folder, quantisation=quantisation)
    rounded = {
        name: dequantize(quantize(a, quantisation), quantisation) if a.ndim == 2 else a
        for name, a in gguf_tensors(folder, "llama").items()
    }
    plain = write_gguf(tmp_path / "plain.gguf", "llama", folder, tensors=rounded)
    assert_same_tree(open_gguf(file).load(dtype="float32"), open_gguf(plain).load(dtype="float32"))
    q = open_gguf(file).load(dtype="float32")["layers"][0]["qkv"][:64].ravel()
    original = open_hf_folder(folder).load(dtype="float32")["layers"][0]["qkv"][:64].ravel()
    cosine = q @ original / np.linalg.norm(q) / np.linalg.norm(original)
    assert cosine > 0.99


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_rows_are_entries_of_the_first_axis_and_not_bytes(tmp_path, kind):
    quantisation = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {"vector": np.arange(64.0, dtype=np.float32)}
    values["matrix"] = np.tile(values["vector"], (3, 1))
    for name, array in values.items():
        writer.add_tensor(name, quantize(array, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = GgufTensors(tmp_path / "m.gguf", read_gguf(tmp_path / "m.gguf")[1])
    for name, array in values.items():
        np.testing.assert_allclose(tensors.rows(name, 1, 3).astype("f4"), array[1:3], atol=0.3)


def test_a_head_of_its_own_is_used_and_a_missing_one_is_tied(tiny, tmp_path):
    untied = write_gguf(tmp_path / "untied.gguf", "llama", tiny / "llama-untied")
    assert not open_gguf(untied).config.tied_head
    tensors = gguf_tensors(tiny / "llama-untied", "llama")
    del tensors["output.weight"]
    tied = write_gguf(tmp_path / "tied.gguf", "llama", tiny / "llama-untied", tensors=tensors)
    assert open_gguf(tied).config.tied_head
    assert "head" not in open_gguf(tied).load(dtype="float32")


def published_llama3_divisors(theta, factor, low, high, original, head_dim):
    """The release's formula, frequency by frequency."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_the_llama3_table_equals_the_published_formula():
    rope = Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    expected = published_llama3_divisors(500000.0, 32.0, 1.0, 4.0, 8192, 64)
    np.testing.assert_allclose(llama3_divisors(rope, 64), expected, rtol=1e-6)
    assert (expected != 1).sum() == 17


@pytest.mark.parametrize(
    "original, keys",
    [
        pytest.param(8192, {}, id="the published context"),
        pytest.param(64, {"llama.rope.scaling.original_context_length": 64}, id="one that is said"),
    ],
)
def test_a_table_of_frequencies_is_llama3_scaling(tiny, tmp_path, original, keys):
    table = published_llama3_divisors(500000.0, 8.0, 1.0, 4.0, original, 8)
    tensors = gguf_tensors(tiny / "llama3-rope-scaled", "llama") | {"rope_freqs.weight": table}
    metadata = {"llama.rope.freq_base": 500000.0} | keys
    file = write_gguf(
        tmp_path / "m.gguf", "llama", tiny / "llama-tied", tensors=tensors, metadata=metadata
    )
    checkpoint = open_gguf(file)
    expected = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, original)
    assert {layer.rope for layer in checkpoint.config.layers} == {expected}
    checkpoint.load(dtype="float32")


def test_linear_scaling_is_read_from_the_keys(tiny, tmp_path):
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "m.gguf", "llama", tiny / "llama-tied", metadata=metadata)
    assert open_gguf(file).config.layers[0].rope == Rope(10000.0, "linear", 4.0)


@pytest.mark.parametrize(
    "metadata, words",
    [
        ({"llama.rope.scaling.type": "yarn"}, ["llama.rope.scaling.type", "yarn", "linear"]),
        ({"llama.expert_count": 8}, ["llama.expert_count", "8"]),
        ({"llama.rope.dimension_count": 4}, ["dimensions", "8", "4"]),
        ({"split.count": 3}, ["3 parts", "gguf-split"]),
        ({"tokenizer.ggml.model": "bert"}, ["tokenizer.ggml.model", "bert", "gpt2"]),
    ],
)
def test_what_no_model_here_runs_is_refused(tiny, tmp_path, metadata, words):
    metadata = {"tokenizer.ggml.tokens": ["a"]} | metadata
    file = write_gguf(tmp_path / "m.gguf", "llama", tiny / "llama-tied", metadata=metadata)
    with pytest.raises(CheckpointError) as refusal:
        open_gguf(file)
    for word in ["m.gguf", *words]:
        assert word in str(refusal.value)


def test_an_unknown_table_of_frequencies_is_refused(tiny, tmp_path):
    table = {"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}
    tensors = gguf_tensors(tiny / "llama-tied", "llama") | table
    file = write_gguf(tmp_path / "m.gguf", "llama", tiny / "llama-tied", tensors=tensors)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_gguf(file)


def test_an_unknown_architecture_is_refused(tiny, tmp_path):
    tensors = gguf_tensors(tiny / "llama-tied", "llama")
    file = write_gguf(tmp_path / "m.gguf", "mamba", tiny / "llama-tied", tensors=tensors)
    with pytest.raises(CheckpointError, match=r"llama, qwen2, qwen3, gemma3, found 'mamba'"):
        open_gguf(file)


def test_missing_and_left_over_tensors_are_named(tiny, tmp_path):
    assert GGUF_LAYER_NAMES["mlp.up_proj"] == "ffn_up"
    tensors = gguf_tensors(tiny / "llama-tied", "llama")
    missing = {name: a for name, a in tensors.items() if name != "blk.1.ffn_up.weight"}
    extra = tensors | {"blk.0.attn_q.bias": np.ones(64, np.float32)}
    for name, kept in [("blk.1.ffn_up.weight", missing), ("blk.0.attn_q.bias", extra)]:
        file = write_gguf(tmp_path / f"{name}.gguf", "llama", tiny / "llama-tied", tensors=kept)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            open_gguf(file).load(dtype="float32")


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 2000, -1])
def test_a_truncated_file_is_refused_wherever_it_ends(tiny, tmp_path, keep):
    whole = write_gguf(tmp_path / "whole.gguf", "llama", tiny / "llama-tied").read_bytes()
    file = tmp_path / "cut.gguf"
    # The writer pads the end of the file, so one byte less would still be complete.
    file.write_bytes(whole[:keep] if keep >= 0 else whole[:-64])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        open_gguf(file)


@pytest.mark.parametrize("start", [b"GGML" + struct.pack("<I", 3), b"GGUF" + struct.pack(">I", 3)])
def test_other_formats_and_byte_orders_are_refused(tmp_path, start):
    file = tmp_path / "other.gguf"
    file.write_bytes(start + bytes(64))
    with pytest.raises(CheckpointError, match=r"little-endian, found b'GG"):
        open_gguf(file)


def test_a_file_is_called_after_itself(tiny, tmp_path):
    file = write_gguf(tmp_path / "my-model.Q8_0.gguf", "llama", tiny / "llama-tied")
    assert open_checkpoint(str(file), Store(tmp_path)).name == "my-model.Q8_0"
