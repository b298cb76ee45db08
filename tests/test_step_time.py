"""The model of a step's duration: what it starts from and what it learns."""

from __future__ import annotations

import dataclasses
import random

import pytest
from toy_promise import ROOFLINE

from jaxserve.sla.step_time import StepLoad, StepTimeModel, measured_seed, roofline_seed

SEED = roofline_seed(ROOFLINE)


def random_load(draw: random.Random) -> StepLoad:
    rows, prefill = draw.randrange(1, 150), draw.choice([0, 0, 100, 300, 1000])
    start = draw.randrange(0, 4000)
    return StepLoad(rows + prefill, rows * 1400 + prefill and start, prefill * start)


def test_before_any_step_it_says_what_the_roofline_says():
    model = StepTimeModel(SEED)
    assert model.predict(StepLoad(1, 0)) == pytest.approx(ROOFLINE.step_seconds(1), rel=0.01)
    decode = StepLoad(100, 100 * 1452)
    assert model.predict(decode) == pytest.approx(ROOFLINE.step_seconds(100, 0, 145_200), rel=0.05)
    prefill = StepLoad(2000, 2000, 2000 * 1000)
    assert model.predict(prefill) == pytest.approx(ROOFLINE.prefill_seconds(2000), rel=0.05)


@pytest.mark.parametrize("truth", [(1.3, 1.8, 1.1, 2.0), (20.0, 50.0, 9.0, 30.0)])
def test_it_learns_a_device_that_is_nothing_like_its_seed(truth):
    draw = random.Random(1)
    device, model = StepTimeModel(SEED), StepTimeModel(SEED)
    device.factors = list(truth)
    for _ in range(400):
        load = random_load(draw)
        model.observe(load, device.predict(load) * draw.gauss(1, 0.03))
    for _ in range(50):
        load = random_load(draw)
        assert model.predict(load) == pytest.approx(device.predict(load), rel=0.1)
    assert model.error < 0.1


def test_it_follows_a_device_that_becomes_slower():
    draw = random.Random(2)
    device, model = StepTimeModel(SEED), StepTimeModel(SEED)
    for slowness in (1.0, 1.5):
        device.factors = [slowness] * 4
        for _ in range(300):
            load = random_load(draw)
            model.observe(load, device.predict(load))
    load = StepLoad(300, 60_000, 200 * 2000)
    assert model.predict(load) == pytest.approx(device.predict(load), rel=0.1)


@pytest.mark.parametrize("steps_before", [0, 200])
def test_a_pause_of_the_host_does_not_move_it(steps_before):
    model = StepTimeModel(SEED)
    load = StepLoad(200, 50_000)
    for _ in range(steps_before):
        model.observe(load, model.predict(load))
    before = model.predict(load)
    for pause in (100, 6):
        model.observe(load, pause * before)
        assert model.predict(load) == before
        model.observe(load, before)
        assert model.predict(load) == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("change", [8.0, 0.1])
def test_several_steps_that_nobody_expected_are_believed(change):
    model = StepTimeModel(SEED)
    load = StepLoad(200, 50_000)
    for _ in range(50):
        model.observe(load, model.predict(load))
    now = change * model.predict(load)
    for _ in range(4):
        model.observe(load, now)
    assert model.predict(load) == pytest.approx(now, rel=0.1)


def test_it_stays_sane_when_every_step_is_alike():
    """The filter must not blow up where the steps tell nothing about three of four factors."""
    model = StepTimeModel(SEED)
    load = StepLoad(1, 100)
    for _ in range(20_000):
        model.observe(load, 0.01)
    assert model.predict(load) == pytest.approx(0.01, rel=0.01)
    assert all(0 < factor < 100 for factor in model.factors)


def test_more_work_is_never_predicted_to_be_quicker():
    draw = random.Random(3)
    model = StepTimeModel(SEED)
    for _ in range(500):
        model.observe(random_load(draw), draw.uniform(0.001, 0.2))
    load = StepLoad(100, 50_000, 1e5)
    for field in ("tokens", "kv_tokens", "pairs"):
        more = dataclasses.replace(load, **{field: 10 * getattr(load, field)})
        assert model.predict(more) >= model.predict(load)


def test_padding_costs_what_it_fills_a_step_up_to():
    model = StepTimeModel(SEED, padded=lambda tokens: 512)
    assert model.predict(StepLoad(300, 0)) == model.predict(StepLoad(512, 0))


def test_timed_steps_make_a_seed():
    seed = measured_seed(
        ROOFLINE.shape, {n: ROOFLINE.prefill_seconds(n) for n in (1, 64, 256, 1024, 2048)}
    )
    assert seed.per_token == pytest.approx(SEED.per_token, rel=0.1)
    assert seed.per_kv_token == pytest.approx(SEED.per_kv_token, rel=0.01)
    assert seed.per_pair == pytest.approx(SEED.per_pair, rel=0.1)
    for tokens in (1, 40, 128, 700, 2048, 4096):
        load = StepLoad(tokens, tokens, 0)
        assert StepTimeModel(seed).predict(load) == pytest.approx(
            ROOFLINE.step_seconds(0, tokens), rel=0.15
        )


def test_steps_that_do_not_take_longer_in_a_straight_line_are_predicted_as_they_were_timed():
    timed = {1: 0.03, 8: 0.09, 32: 0.08, 128: 0.2, 256: 0.9}
    model = StepTimeModel(measured_seed(ROOFLINE.shape, timed))
    at = [model.predict(StepLoad(tokens, 0)) for tokens in (1, 8, 32, 80, 128, 256, 512)]
    assert at == pytest.approx([0.03, 0.09, 0.09, 0.145, 0.2, 0.9, 1.77])
    assert measured_seed(ROOFLINE.shape, {1: 0.03}).token_seconds(64) == 0.0
