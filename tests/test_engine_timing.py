"""When the engine schedules: late enough for newcomers, early enough for the device."""

from __future__ import annotations

import pytest
from toy_promise import ask, make_policy, make_scheduler

from jaxserve.engine import POLL, Engine
from jaxserve.executor import Launched, Prepared
from jaxserve.policy import MARGIN, NoPromise
from jaxserve.sequence import Drawn
from jaxserve.simulate import VirtualClock


class Device:
    """Takes steps and remembers them; the time is the test's."""

    def __init__(self) -> None:
        self.steps = []
        self.done = False

    def move(self, moves) -> None:
        assert not moves

    def prepare(self, spans) -> Prepared:
        return Prepared(spans, (), False, None, None, None)

    def launch(self, prepared) -> Launched:
        self.steps.append([span.sequence.request.request_id for span in prepared.spans])
        return Launched(prepared.spans, None, 0.0)

    def is_done(self, launched: Launched) -> bool:
        return self.done

    def collect(self, launched: Launched) -> list[Drawn]:
        return [Drawn(1)] * len(launched.spans)


def make_engine(policy, **settings) -> tuple[Engine, Device, VirtualClock]:
    clock, device = VirtualClock(), Device()
    return Engine(make_scheduler(policy, clock), device, **settings), device, clock


def test_while_a_step_runs_there_is_time_to_spare_and_whoever_comes_is_in_the_next():
    policy = make_policy()
    engine, device, clock = make_engine(policy)
    assert engine.spare_seconds == 0.0
    engine.add(ask("a", 200))
    engine.step()
    expected = policy.device_free
    waited = 0.0
    while spare := engine.spare_seconds:
        waited += spare
        clock.now += spare
    assert waited == pytest.approx((1 - MARGIN) * expected)
    engine.add(ask("b", 10))
    engine.step()
    assert device.steps == [["a"], ["a", "b"]]


@pytest.mark.parametrize("settings", [{}, {"look_ahead": False}])
def test_nobody_waits_where_nobody_can_tell_how_long_a_step_takes_or_nothing_runs(settings):
    policy = make_policy() if settings else NoPromise()
    engine, _, _ = make_engine(policy, **settings)
    engine.add(ask("a", 200))
    engine.step()
    assert engine.spare_seconds == 0.0


def test_what_preparing_and_launching_take_is_kept_free_at_the_end_of_a_step(monkeypatch):
    class Stopwatch:
        now = 0.0

    class SlowHost(Device):
        def prepare(self, spans) -> Prepared:
            Stopwatch.now += share * policy.device_free
            return super().prepare(spans)

        def launch(self, prepared) -> Launched:
            Stopwatch.now += share * policy.device_free
            return super().launch(prepared)

    monkeypatch.setattr("jaxserve.engine.time.perf_counter", lambda: Stopwatch.now)
    policy, clock, share = make_policy(), VirtualClock(), MARGIN
    engine = Engine(make_scheduler(policy, clock), SlowHost())
    engine.add(ask("a", 200))
    engine.step()
    took = Stopwatch.now
    waited = 0.0
    while spare := engine.spare_seconds:
        waited += spare
        clock.now += spare
    assert took > MARGIN * policy.device_free
    assert waited == pytest.approx(policy.device_free - took)


def test_a_step_that_is_done_sooner_than_expected_is_noticed():
    engine, device, _ = make_engine(make_policy())
    engine.add(ask("a", 200))
    engine.step()
    before = engine.spare_seconds
    device.done = True
    assert before > 0 and engine.spare_seconds == 0.0


def test_while_the_device_works_requests_come_and_go():
    engine, device, _ = make_engine(NoPromise())
    pool = engine.scheduler.pool
    engine.add(ask("stays", 20, 3))
    engine.add(ask("goes", 20, 3))
    engine.step()
    calls = []

    def meanwhile(patience: float) -> None:
        assert 0 <= patience <= POLL
        calls.append(patience)
        if len(calls) == 1:
            assert engine.abort("goes")
            engine.add(ask("comes", 20, 3))
        device.done = len(calls) == 3

    answered = [event.request_id for event in engine.step(meanwhile)]
    assert len(calls) == 3
    assert answered == ["stays"], "what was aborted meanwhile says nothing any more"
    while engine.has_work:
        answered += [event.request_id for event in engine.step(meanwhile)]
    assert sorted(answered) == ["comes"] * 3 + ["stays"] * 3
    assert pool.num_live == 0
