"""The plan: the workload's averages, the limits, and what a plan cannot promise."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree

import pytest

from jaxserve.cards import CARDS
from jaxserve.errors import ConfigError
from jaxserve.plan import (
    PLAN_MODELS,
    Plan,
    make_plan,
)
from jaxserve.plan.chart import draw_chart
from jaxserve.roofline import ModelShape, Roofline, model_shape
from jaxserve.workload import Promise, Workload

LLAMA = PLAN_MODELS["llama-3.1-8b"]
A100 = CARDS["a100-80gb"]


def shape_of(name: str, **changes: int) -> ModelShape:
    return model_shape(name, dataclasses.replace(PLAN_MODELS[name], **changes))


@pytest.fixture(scope="module")
def full() -> Roofline:
    return Roofline(shape_of("llama-3.1-8b"), A100)


@pytest.fixture(scope="module")
def reference(full: Roofline) -> Plan:
    return make_plan(full, Workload(), Promise())


def test_lengths_are_log_normal_through_their_percentiles():
    workload = Workload(prompt_max=10**9)
    assert workload.prompt_mean == pytest.approx(1290, abs=2)  # 800 exp(sigma^2 / 2)
    assert Workload().prompt_mean < workload.prompt_mean
    assert workload.output_mean == pytest.approx(250, abs=1)


def test_lengths_that_are_all_the_same_are_their_mean():
    workload = Workload(500, 500, 500, 100, 100)
    assert (workload.prompt_mean, workload.output_mean) == (500, 100)
    assert workload.running_context == 550


def test_the_admission_limit_is_where_tpot_is_just_kept(full, reference):
    points = {point.rows: point for point in reference.batches}
    limit = reference.limits.admission
    assert points[limit].tpot_seconds <= 0.033
    beyond = make_plan(full, Workload(), Promise(tpot=points[limit].tpot_seconds - 1e-6))
    assert beyond.limits.admission == limit - 1


def test_the_limits_of_the_reference_case_are_far_below_memory(reference):
    limits = reference.limits
    assert limits.ttft < limits.admission < limits.decode_only < limits.memory
    assert 45 <= limits.admission <= 55
    assert reference.token_budget == limits.admission + reference.chunk
    assert reference.chunk >= reference.prefill_share


def test_chunk_is_what_the_step_has_room_for(full, reference):
    rows, context = reference.limits.admission, reference.context
    decodes = full.decode_work(rows, context)
    middle = (4000 - reference.chunk) / 2
    for tokens, fits in ((reference.chunk, True), (reference.chunk + 1, False)):
        step = decodes + full.shape.span(middle, middle + tokens)
        assert (full.work_seconds(step) <= 0.033) is fits


def test_prompts_keep_up_with_outputs_at_the_admission_limit(reference):
    drawn = reference.requests_per_second * reference.workload.output_mean
    point = next(p for p in reference.batches if p.rows == reference.limits.admission)
    assert drawn == pytest.approx(point.tokens_per_second)


def test_a_prompt_at_the_ttft_limit_is_ready_in_time(full, reference):
    limit = reference.limits.ttft
    plan = make_plan(full, Workload(), Promise(), kv_memory=limit * reference.context * 131_072 + 1)
    assert plan.limits.admission == limit
    (prompt,) = [point for point in plan.prefills if point.tokens == 4000]
    assert prompt.ttft_seconds <= 0.5
    assert any("keeps TTFT" in note for note in plan.notes)


def test_decode_heavy_work_is_limited_by_memory_on_a_small_card():
    small = Roofline(shape_of("llama-3.1-8b"), CARDS["rtx-4090"])
    plan = make_plan(small, Workload(100, 200, 400, 2000, 3000), Promise(tpot=0.2))
    assert plan.limits.admission == plan.limits.memory
    assert any("Memory, not TPOT" in note for note in plan.notes)


def test_a_smaller_prefill_share_admits_more_but_serves_no_more_requests(full, reference):
    plan = make_plan(full, Workload(), Promise(), min_prefill=64)
    assert reference.limits.admission < plan.limits.admission < plan.limits.decode_only
    assert plan.requests_per_second <= reference.requests_per_second


def test_a_promise_that_cannot_be_kept_is_a_plan_that_says_so(full):
    plan = make_plan(full, Workload(), Promise(tpot=0.005))
    assert plan.limits.admission == 0
    assert plan.requests_per_second == 0
    assert plan.notes[0].startswith("The promise cannot be kept: a step for one sequence")
    assert "null" in plan.to_json()
    ElementTree.fromstring(draw_chart(plan))


def test_a_cache_too_small_for_one_sequence_is_a_plan_that_says_so(full):
    plan = make_plan(full, Workload(), Promise(), kv_memory=1e6)
    assert plan.limits.memory == 0
    assert "cache holds no sequence" in plan.notes[0]


def test_requests_longer_than_the_model_takes_are_noted():
    plan = make_plan(Roofline(shape_of("smollm2-135m"), A100), Workload(), Promise())
    assert any("need 8,600 tokens; the model was made for 8,192" in n for n in plan.notes)


@pytest.mark.parametrize("name", PLAN_MODELS)
@pytest.mark.parametrize("card", CARDS)
def test_every_known_model_can_be_planned_on_every_card_it_fits(name, card):
    plan = make_plan(Roofline(shape_of(name), CARDS[card]), Workload(), Promise())
    assert 1 <= plan.limits.admission <= plan.limits.memory
    assert len(plan.batches) < 40
    json.loads(plan.to_json())
    ElementTree.fromstring(draw_chart(plan))


def test_weights_that_do_not_fit_are_refused_with_both_sizes():
    shape = model_shape("big", LLAMA, weight_dtype="float32")
    with pytest.raises(ConfigError, match=r"32\.1 GB of weights .* 90% of the 25\.8 GB of rtx"):
        make_plan(Roofline(shape, CARDS["rtx-4090"]), Workload(), Promise())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload(prompt_p95=100), "p50 800, p95 100 and max 8000 must not fall"),
        (lambda: Workload(output_p95=100), "p50 200 and p95 100 must not fall"),
        (lambda: Promise(ttft=0.0), "more than 0 ms"),
    ],
)
def test_a_workload_or_promise_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
