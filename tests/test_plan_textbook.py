"""The textbook's figures, from the planner's weights-only mode, and where they are optimistic."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.cards import CARDS
from jaxserve.plan import (
    PLAN_MODELS,
    make_plan,
    max_sequences,
    over_reservation,
    shared_prompt_saving,
    static_batch_utilisation,
)
from jaxserve.roofline import ModelShape, Roofline, model_shape
from jaxserve.workload import Promise, Workload

A100 = CARDS["a100-80gb"]


def shape_of(name: str, **changes: int) -> ModelShape:
    return model_shape(name, dataclasses.replace(PLAN_MODELS[name], **changes))


@pytest.fixture(scope="module")
def full() -> Roofline:
    return Roofline(shape_of("llama-3.1-8b"), A100)


@pytest.fixture(scope="module")
def textbook(full: Roofline) -> Roofline:
    """The weights-only mode, for a model of 8e9 parameters to the digit."""
    params = 8_000_000_000 - 2 * full.shape.table_params
    shape = dataclasses.replace(full.shape, layer_params=params)
    return dataclasses.replace(full, shape=shape, weights_only=True)


def test_the_weights_are_16_gb(textbook):
    assert textbook.shape.weight_bytes == 16e9


def test_the_decode_floor_is_7_8_ms_and_one_sequence_gets_128_tokens_a_second(textbook):
    assert round(textbook.step_seconds(1) * 1e3, 1) == 7.8
    assert 1 / textbook.step_seconds(1) == pytest.approx(128, rel=0.01)


def test_the_real_parameter_count_changes_the_floor_by_less_than_a_hundredth(textbook, full):
    real = dataclasses.replace(full, weights_only=True)
    assert real.step_seconds(1) == pytest.approx(textbook.step_seconds(1), rel=0.01)


def test_a_token_takes_128_kib_of_cache_and_512_without_grouped_heads(textbook):
    assert textbook.shape.kv_bytes_per_token == 128 * 1024
    assert shape_of("llama-3.1-8b", num_kv_heads=32).kv_bytes_per_token == 512 * 1024


def test_60_gb_hold_about_460_sequences_and_about_117_without_grouped_heads():
    assert max_sequences(60e9, 128 * 1024, 1000) == pytest.approx(460, rel=0.01)
    assert max_sequences(60e9, 512 * 1024, 1000) == pytest.approx(117, rel=0.03)
    assert max_sequences(60e9, 512 * 1000, 1000) == 117  # a KiB counted as 1,000 bytes


def test_the_card_has_those_60_gb_left_beside_the_weights(full):
    plan = make_plan(full, Workload(), Promise())
    assert plan.kv_memory_bytes == pytest.approx(60e9, rel=0.02)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(800, 82), (4000, 410)])
def test_prefill_takes_two_operations_a_parameter_at_half_the_peak(textbook, tokens, milliseconds):
    assert round(textbook.prefill_seconds(tokens) * 1e3) == milliseconds


def test_a_static_batch_with_one_long_output_uses_17_percent_of_its_rows():
    assert round(static_batch_utilisation([50] * 7 + [1000]), 2) == 0.17
    assert static_batch_utilisation([30] * 4) == 1


def test_reserving_the_whole_context_wastes_97_percent():
    assert round(over_reservation(32_768, 1000), 2) == 0.97
    assert round(over_reservation(8_192, 240), 2) == 0.97


def test_sharing_a_2000_token_prompt_among_100_requests_saves_25_gb():
    assert shared_prompt_saving(128 * 1000, 2000, 100) == pytest.approx(25e9, rel=0.02)
    assert shared_prompt_saving(128 * 1024, 2000, 100) == pytest.approx(25e9, rel=0.04)


def test_kv_reads_alone_take_30_ms_where_the_weights_only_picture_has_none(textbook, full):
    reads = full.step_seconds(460, kv_tokens=460_000) - full.step_seconds(460)
    assert reads == pytest.approx(0.030, rel=0.02)
    assert textbook.step_seconds(460, kv_tokens=460_000) == textbook.step_seconds(460)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_plan_says_where_the_weights_only_picture_is_optimistic(full, weights_only):
    roofline = dataclasses.replace(full, weights_only=weights_only)
    plan = make_plan(roofline, Workload(context=1000), Promise(), kv_memory=460 * 1000 * 131_072)
    (note,) = [note for note in plan.notes if "optimistic" in note]
    assert "460 sequences of 1,000 tokens" in note
    assert "KV reads alone take 29.6 ms" in note
