"""Steps by the roofline: what is counted, layer by layer, on which card."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.cards import CARDS, find_card
from jaxserve.errors import ConfigError
from jaxserve.plan import (
    PLAN_MODELS,
)
from jaxserve.roofline import ModelShape, Roofline, model_shape

LLAMA = PLAN_MODELS["llama-3.1-8b"]
A100 = CARDS["a100-80gb"]


def shape_of(name: str, **changes: int) -> ModelShape:
    return model_shape(name, dataclasses.replace(PLAN_MODELS[name], **changes))


@pytest.fixture(scope="module")
def full() -> Roofline:
    return Roofline(shape_of("llama-3.1-8b"), A100)


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen3-8b", 8_190_735_360),
        ("qwen2.5-7b", 7_615_616_512),
        ("mistral-7b", 7_248_023_552),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("gemma-3-1b", 999_885_952),
        ("gemma-3-270m", 268_098_176),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_a_known_model_has_the_published_number_of_parameters(name, num_params):
    assert shape_of(name).num_params == num_params


def test_multi_query_attention_reads_one_head_in_thirty_two():
    many, one = (shape_of("llama-3.1-8b", num_kv_heads=heads).span(999, 1000) for heads in (32, 1))
    assert many.kv_bytes == 32 * one.kv_bytes
    assert many.attention_flops == one.attention_flops


def test_a_window_bounds_what_is_read_but_not_what_is_kept():
    windowed, plain = shape_of("mistral-7b-v0.1"), shape_of("mistral-7b")
    assert windowed.kv_bytes_per_token == plain.kv_bytes_per_token
    assert windowed.span(3999, 4000) == plain.span(3999, 4000)
    assert windowed.span(7999, 8000).kv_bytes == plain.span(4095, 4096).kv_bytes


def test_windows_count_layer_by_layer():
    shape = shape_of("gemma-3-270m")  # 15 layers see 512 tokens, 3 see everything
    assert shape.span(2047, 2048).kv_bytes == shape.kv_bytes_per_layer * (15 * 512 + 3 * 2048)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-270m", "mistral-7b-v0.1"])
def test_a_prompt_in_chunks_attends_to_as_many_pairs_as_in_one(name):
    shape = shape_of(name)
    chunks = [shape.span(start, start + 700) for start in range(0, 7000, 700)]
    whole = shape.span(0, 7000)
    assert sum(chunk.attention_flops for chunk in chunks) == whole.attention_flops


def test_pairs_of_a_window_are_those_a_mask_has():
    shape = dataclasses.replace(shape_of("smollm2-135m"), windows=(4,))
    pairs = sum(1 for query in range(3, 9) for key in range(9) if query - 4 < key <= query)
    assert shape.span(3, 9).attention_flops == 4 * 9 * 64 * pairs
    assert shape.span(3, 9).kv_bytes == 9 * shape.kv_bytes_per_token  # tokens 0 to 8


def test_a_step_only_grows_with_what_it_has_to_do(full):
    steps = [full.step_seconds(rows, 0, rows * 1000) for rows in (1, 8, 64, 77, 78, 256)]
    assert steps == sorted(steps)
    assert full.step_seconds(64, 256, 64_000) > full.step_seconds(64, 0, 64_000)
    slow = dataclasses.replace(full, overhead=0.001)
    assert slow.step_seconds(1) == pytest.approx(full.step_seconds(1) + 0.001)


def test_arithmetic_outlasts_the_weights_from_the_row_that_is_named(full):
    rows = full.compute_bound_rows
    assert full.step_seconds(rows - 1) == full.step_seconds(1)
    assert full.step_seconds(rows) > full.step_seconds(1)


def test_an_embedding_of_its_own_is_held_but_not_read():
    untied, tied = shape_of("llama-3.1-8b"), shape_of("llama-3.2-1b")
    assert untied.weight_bytes - untied.read_bytes == 2 * 128_256 * 4096
    assert tied.weight_bytes == tied.read_bytes


def test_int8_weights_halve_the_floor(full):
    shape = model_shape("x", LLAMA, weight_dtype="int8", kv_dtype="int8")
    assert shape.kv_bytes_per_token == 66 * 1024  # 2 KiB of it are scales
    halved = dataclasses.replace(full, shape=shape).step_seconds(1)
    assert halved == pytest.approx(full.step_seconds(1) / 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "v100"}, "no card 'v100': known are a100-80gb, a100-40gb, .* and cpu"),
        ({"name": "cpu", "memory": 1e9}, "give --memory .*, --bandwidth .* and --flops"),
    ],
)
def test_a_card_nobody_knows_the_rates_of_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        find_card(**settings)


def test_measured_rates_replace_published_ones():
    card = find_card("a100-80gb", bandwidth=1.7e12)
    assert (card.bandwidth, card.bf16_flops) == (1.7e12, A100.bf16_flops)
    cpu = find_card("cpu", memory=16e9, bandwidth=20e9, flops=1e11)
    assert cpu.flops("float32") == cpu.flops("int8") == 1e11
