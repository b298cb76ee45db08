"""The promise through the real scheduler: admission, shares, fairness, deadlines, coming again."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random

import pytest
from toy_promise import PROMISE, ROOFLINE, ask, make_policy, make_scheduler, serve

from jaxserve.errors import ConfigError
from jaxserve.plan import make_plan
from jaxserve.policy import MARGIN, Load, NoPromise
from jaxserve.request import Request
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Drawn
from jaxserve.simulate import REFERENCE, Arrival, SimulatedDevice, VirtualClock, poisson, run
from jaxserve.sla.ladder import FIRST
from jaxserve.sla.outlook import look
from jaxserve.sla.pace import CALM, SHORT_ANSWER, Decodes, Pace
from jaxserve.sla.retry import Places
from jaxserve.sla.step_time import StepTimeModel, measured_seed, roofline_seed
from jaxserve.workload import Promise, Workload


def make_pace() -> Pace:
    return Pace(StepTimeModel(roofline_seed(ROOFLINE)), PROMISE.tpot)


# How many run, how much they prefill.


def test_the_running_limit_is_the_planners():
    """The same arithmetic, once for the planner's averages and once from what is running."""
    work = Workload(prompt_p50=300, prompt_p95=1000, prompt_max=2000)
    promise = dataclasses.replace(PROMISE, tpot=CALM * PROMISE.tpot)
    planned = make_plan(ROOFLINE, work, promise).limits.admission
    limit = make_pace().running_limit(work.running_context, work.prompt_per_output, 1000)
    assert limit == pytest.approx(planned, rel=0.1)


def test_the_running_limit_falls_by_a_small_share_whatever_its_size():
    """Those who wait were let in with the old limit in mind."""
    policy = make_policy()
    falls = []
    for context in (20_000, 1452):
        policy._context, policy._limit = float(context), 0.0
        policy._set_limit(Load([], [], 256, 4096))
        before = policy.running_limit
        policy._context = 1e6
        for _ in range(10):
            policy._set_limit(Load([], [], 256, 4096))
        falls.append(policy.running_limit / before)
    assert falls == pytest.approx([0.9, 0.9], abs=0.1)


def test_long_prompts_do_not_lower_the_limit_beyond_half_a_step():
    work, pace = Workload(), make_pace()
    rows = pace.running_limit(work.running_context, work.prompt_per_output, 1000)
    assert rows == pace.running_limit(work.running_context, 10 * work.prompt_per_output, 1000)
    decodes = Decodes(rows, round(rows * work.running_context))
    left = pace.calm - pace.step_seconds(decodes, 0, 0)
    assert left == pytest.approx(pace.calm / 2, rel=0.1)


def test_where_prompts_are_cached_kv_reads_set_the_limit():
    work = Workload()
    promise = dataclasses.replace(PROMISE, tpot=CALM * PROMISE.tpot)
    decode_only = make_plan(ROOFLINE, work, promise).limits.decode_only
    assert make_pace().running_limit(work.running_context, 0.0, 1000) == pytest.approx(
        decode_only, rel=0.05
    )


def test_a_step_is_filled_up_to_the_tpot_and_no_further():
    pace = make_pace()
    decodes = Decodes(40, 40 * 1452)
    tokens = pace.prefill_tokens(decodes, 500, pace.calm, 4096)
    assert pace.step_seconds(decodes, tokens, 500) <= pace.calm
    assert pace.step_seconds(decodes, tokens + 2, 500) > pace.calm


@pytest.mark.parametrize("quick", [0.0, 0.3, 0.7])
def test_whatever_is_left_out_an_answer_keeps_its_tpot(quick):
    """Decodes left out of every second step while `to_spare` allows it, some steps quick."""
    draw, pace = random.Random(1), make_pace()
    gaps: list[float] = []
    for _ in range(1500):
        step = pace.calm * (0.3 if draw.random() < quick else 1.0)
        answers = itertools.accumulate(reversed(gaps[-400:]), initial=0.0)
        spares = [pace.to_spare(n + 1, took) for n, took in enumerate(answers)]
        spare = min((spare for spare in spares if spare > 0), default=0.0)
        gaps.append(step + pace.calm * (spare > pace.calm))
        pace.count(gaps[-1])
    assert sum(gap > 1.2 * pace.calm for gap in gaps) > 50, "some are left out"
    for start in range(len(gaps) - SHORT_ANSWER):
        answer = gaps[start : start + SHORT_ANSWER]
        assert sum(answer) / len(answer) <= 1.02 * PROMISE.tpot


def test_a_prompt_at_risk_leaves_decodes_out_of_every_second_step_and_keeps_every_promise():
    decodes = [Arrival(i / 30, ask(f"d{i}", 200, 600)) for i in range(30)]
    risky = Arrival(3.0, ask("risky", 4200, 10))
    clock = VirtualClock()
    scheduler = make_scheduler(make_policy(), clock)
    left_out = []

    class Watching(SimulatedDevice):
        def seconds(self, spans):
            counts = [span.num_tokens for span in spans]
            if 3.0 <= clock.now < 3.5:
                left_out.append(1 not in counts)
            return super().seconds(spans)

    outcomes = run([*decodes, risky], scheduler, Watching(ROOFLINE), clock).outcomes
    assert sum(left_out) >= 3
    assert not any(a and b for a, b in itertools.pairwise(left_out)), "never twice in a row"
    assert all(o.ttft < PROMISE.ttft and o.tpot < PROMISE.tpot for o in outcomes)


def test_decodes_are_not_left_out_for_prompts_that_wait_for_a_slot():
    policy, clock = make_policy(), VirtualClock()
    scheduler = make_scheduler(policy, clock, max_rows=4)
    for i in range(6):
        scheduler.add(ask(f"stream{i}", 100, 1000), arrived=clock())
    decoded = 0
    for _ in range(200):
        spans = scheduler.schedule()
        scheduler.commit(spans, [Drawn(7)] * len(spans))
        scheduler.policy.observe_step(spans, 0.01, clock())
        clock.now += 0.01  # the two that wait have been late since 0.5 s
        decoded += sum(span.num_tokens == 1 for span in spans)
    assert clock() > 2 * PROMISE.ttft
    assert decoded > 4 * 190


def hurried(step_seconds: dict[int, float], tpot: float) -> str | None:
    """How a device with such steps gets a prompt at risk done beside four decodes."""
    pace = Pace(StepTimeModel(measured_seed(ROOFLINE.shape, step_seconds)), tpot)
    load = Load([], [], 64, 256)
    outlook = dataclasses.replace(look(load, pace, 1.0, 0.0), decodes=Decodes(4, 400), most=252)
    return outlook.hurry(pace.seconds)


def test_a_device_that_needs_long_steps_gets_long_steps_and_others_leave_decodes_out():
    steep = {1: 0.035, 16: 0.12, 64: 0.22, 256: 0.6}  # 16 tokens take half as long as 64
    straight = {1: 0.035, 16: 0.05, 64: 0.2, 256: 0.8}
    assert hurried(steep, tpot=0.15) == "long step"
    assert hurried(straight, tpot=0.15) == "leave out"


def test_on_a_slow_server_the_wait_for_a_slot_is_known_before_anyone_has_finished():
    """Three rows, answers of 100 tokens: a slot every 33 tokens. The fourth would wait for one."""
    policy = make_policy()
    policy._limit = 3.0
    clock = VirtualClock()
    scheduler = make_scheduler(policy, clock, max_rows=3)
    for name in "abc":
        scheduler.add(ask(name, 10, 100))
    spans = scheduler.schedule()
    policy.observe_step(spans, 0.03, 0.03)
    scheduler.commit(spans, [Drawn(1)] * len(spans))
    interval = policy._slot_interval(scheduler.load)
    assert interval == pytest.approx(100 * policy.pace.usual / 3, rel=0.01)


def test_who_comes_while_a_step_runs_is_in_the_next_one():
    """The next step is scheduled shortly before the end of the one that runs, not at its start."""
    clock = VirtualClock()
    scheduler = make_scheduler(make_policy(), clock)
    running = [Arrival(0.0, ask("a", 4000, 300))]
    late = [Arrival(1 + i / 7, ask(f"b{i}", 1, 2)) for i in range(10)]
    outcomes = run([*running, *late], scheduler, SimulatedDevice(ROOFLINE), clock).outcomes
    step = ROOFLINE.step_seconds(2, kv_tokens=2 * 4300)
    for outcome in outcomes[1:]:
        assert outcome.ttft < (1 + 1 + MARGIN) * step, "the rest of a step, and its own"


@pytest.mark.parametrize("values", [(0.0, 0.033, 95), (0.5, -1, 95), (0.5, 0.03, 100)])
def test_a_promise_that_is_none_is_refused(values):
    with pytest.raises(ConfigError):
        Promise(*values)


# Who is let in.


def test_an_idle_server_lets_anyone_in_and_keeps_time():
    outcomes = serve(make_policy(), [Arrival(0.0, ask("a", 3000)), Arrival(9.0, ask("b", 4000))])
    assert all(outcome.refusal is None for outcome in outcomes.values())
    assert all(outcome.ttft < PROMISE.ttft for outcome in outcomes.values())


def test_a_prompt_too_long_for_the_promise_is_served_all_the_same():
    (outcome,) = serve(make_policy(), [Arrival(0.0, ask("long", 15_000))]).values()
    assert outcome.refusal is None and outcome.num_tokens == 100
    assert outcome.ttft > PROMISE.ttft


def test_a_server_too_slow_for_every_prompt_serves_a_few_and_refuses_the_rest():
    slow = dataclasses.replace(PROMISE, ttft=0.05)
    burst = [Arrival(i / 1000, ask(f"r{i}", 1500)) for i in range(60)]
    outcomes = serve(make_policy(slow), burst).values()
    served = [outcome for outcome in outcomes if outcome.refusal is None]
    assert 1 <= len(served) <= FIRST + 1, "the allowance, and no more"
    assert max(outcome.ttft for outcome in served) < 3


def test_of_a_burst_those_are_let_in_who_can_be_served_in_time():
    burst = [Arrival(i / 1000, ask(f"r{i}", 800)) for i in range(200)]
    outcomes = serve(make_policy(), burst).values()
    served = [outcome for outcome in outcomes if outcome.refusal is None]
    late = [outcome for outcome in served if outcome.ttft > PROMISE.ttft]
    assert len(served) >= 5
    assert len(late) <= 17, "the allowance, and no more"
    refused = [outcome.refusal for outcome in outcomes if outcome.refusal is not None]
    assert {refusal.reason for refusal in refused} == {"late"}
    assert all(refusal.retry_after >= 1 for refusal in refused)


@pytest.mark.parametrize("policy", [make_policy(max_queue=5), NoPromise(max_queue=5)])
def test_the_queue_is_bounded(policy):
    arrivals = [Arrival(0.0, ask(f"r{i}", 3000, service_class="batch")) for i in range(40)]
    outcomes = serve(policy, arrivals).values()
    refusals = [outcome.refusal for outcome in outcomes if outcome.refusal is not None]
    assert len(refusals) == 35
    assert {refusal.reason for refusal in refusals} == {"full"}
    assert policy.report().refused == {"full": 35}


@pytest.mark.parametrize("policy", [make_policy(max_tokens_cap=7), NoPromise(max_tokens_cap=7)])
def test_no_answer_is_longer_than_the_cap(policy):
    arrivals = [Arrival(0.0, ask("a", 10, 100)), Arrival(0.0, ask("b", 10, 3))]
    outcomes = serve(policy, arrivals)
    assert (outcomes["a"].num_tokens, outcomes["b"].num_tokens) == (7, 3)


# Coming again.


@pytest.mark.parametrize("seed", [6, 9, 11])
def test_who_comes_again_when_told_to_is_let_in(seed):
    """22 s at three times the capacity, calm after it. Those who are refused are long prompts: let
    in the second time, some are late all the same."""
    burst, calm = poisson(REFERENCE, 200, 9.0, seed), poisson(REFERENCE, 100, 1.5, seed + 50)
    arrivals = [
        Arrival(shift + a.at, dataclasses.replace(a.request, request_id=f"{shift}-{i}"))
        for shift, some in ((0.0, burst), (22.0, calm))
        for i, a in enumerate(some)
    ]
    clock = VirtualClock()
    tries = Again(make_scheduler(make_policy(), clock), clock)
    tries.run(arrivals)
    assert tries.num_refused >= 20
    assert tries.num_let_in >= 0.9 * tries.num_refused
    assert tries.num_in_time >= 0.5 * tries.num_let_in


def test_no_more_are_told_to_come_again_than_there_is_time_for():
    """Work of 0.8 s each, and 0.4 s of every second: one every two seconds, in turn."""
    places = Places()
    asked = [ask(f"p{i}", 10) for i in range(20)]
    waits = [places.reserve(request, 0.0, earliest=1.0, work=0.8) for request in asked]
    assert waits == [1 + 2 * i for i in range(20)]
    assert all(places.claim(request, wait) for request, wait in zip(asked, waits, strict=True))
    small = [places.reserve(ask(f"s{i}", 10), 100.0, earliest=0.2, work=0.2) for i in range(4)]
    assert small == [1, 1, 2, 2]


class Again:
    """The engine's loop, and clients that honour Retry-After, once."""

    def __init__(self, scheduler: Scheduler, clock: VirtualClock) -> None:
        self.scheduler, self.clock = scheduler, clock
        self.num_refused = self.num_let_in = self.num_in_time = 0
        self._second_tries: dict[str, float] = {}

    def run(self, arrivals: list[Arrival]) -> None:
        device = SimulatedDevice(ROOFLINE)
        queue = [(a.at, i, a.request) for i, a in enumerate(arrivals)]
        while queue or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.clock.now = max(self.clock.now, queue[0][0])
            while queue and queue[0][0] <= self.clock.now:
                self._ask(queue, *heapq.heappop(queue))
            spans = self.scheduler.schedule()
            seconds = device.seconds(spans)
            self.clock.now += seconds
            self.scheduler.policy.observe_step(spans, seconds, self.clock.now)
            for event in self.scheduler.commit(spans, [Drawn(1)] * len(spans)):
                at = self._second_tries.pop(event.request_id, None)
                if at is not None:
                    self.num_in_time += self.clock.now - at < PROMISE.ttft

    def _ask(self, queue: list, at: float, index: int, request: Request) -> None:
        refusal = self.scheduler.add(request, arrived=at)
        if request.request_id in self._second_tries:
            self.num_let_in += refusal is None
        elif refusal is not None:
            self.num_refused += 1
            again = at + refusal.retry_after
            self._second_tries[request.request_id] = again
            heapq.heappush(queue, (again, index, request))


# Among others.


def test_a_flood_of_one_tenant_makes_that_tenant_late_and_nobody_else():
    flood = [Arrival(i / 12, ask(f"f{i}", 1500, tenant="flood")) for i in range(360)]
    quiet = [Arrival(1 + i, ask(f"q{i}", 1500, tenant="quiet")) for i in range(28)]
    outcomes = serve(make_policy(), [*flood, *quiet])
    mine = [outcome for name, outcome in outcomes.items() if name[0] == "q"]
    theirs = [outcome for name, outcome in outcomes.items() if name[0] == "f"]
    in_time = [sum(outcome.ttft < PROMISE.ttft for outcome in some) for some in (mine, theirs)]
    assert in_time[0] > 0.7 * len(mine)
    assert in_time[1] < 0.5 * len(theirs)
    assert max(outcome.ttft for outcome in mine) < 1.2 * PROMISE.ttft
    assert all(outcome.refusal is None for outcome in mine)


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones():
    short = [Arrival(i / 12, ask(f"s{i}", 800, 20)) for i in range(1000)]
    outcomes = serve(make_policy(), [Arrival(0.5, ask("long", 15_000, 1)), *short])
    long = outcomes["long"]
    assert long.refusal is None
    assert long.ttft < 40, "a quarter of each step, once it has waited 10 x TTFT"


def test_the_batch_class_takes_what_is_left_over_and_delays_nobody():
    interactive = [Arrival(i / 2, ask(f"i{i}", 1500, 100)) for i in range(60)]
    batch = [Arrival(0.0, ask(f"b{i}", 2000, 200, service_class="batch")) for i in range(40)]
    outcomes = serve(make_policy(), [*interactive, *batch])
    alone = serve(make_policy(), interactive)
    assert all(outcome.refusal is None for outcome in outcomes.values())
    for name in alone:
        assert outcomes[name].ttft < PROMISE.ttft
        assert outcomes[name].tpot < PROMISE.tpot
    ends = sorted(o.last for name, o in outcomes.items() if name[0] == "b")
    assert ends[len(ends) // 2] < 30, "it does get its share of an idle device"


def test_interactive_requests_push_the_batch_class_out_when_rows_are_short():
    batch = [Arrival(0.0, ask(f"b{i}", 100, 400, service_class="batch")) for i in range(8)]
    interactive = [Arrival(1.0 + i / 100, ask(f"i{i}", 100, 50)) for i in range(8)]
    for policy in (make_policy(), NoPromise()):
        outcomes = serve(policy, [*batch, *interactive], max_rows=8)
        assert all(o.num_tokens == o.arrival.request.sampling.max_tokens for o in outcomes.values())
        assert max(outcomes[f"i{i}"].ttft for i in range(8)) < PROMISE.ttft


def test_the_batch_class_loses_its_pages_first():
    first = [Arrival(0.0, ask("i", 100, 150)), Arrival(0.0, ask("j", 100, 150))]
    batch = [Arrival(0.2, ask("b", 100, 100, service_class="batch"))]
    outcomes = serve(NoPromise(), [*first, *batch], num_pages=34)
    assert outcomes["i"].last < outcomes["b"].last and outcomes["j"].last < outcomes["b"].last


def test_a_deadline_that_passes_ends_a_request_and_frees_what_it_held():
    outcomes = serve(NoPromise(), [Arrival(0.0, ask("a", 100, 1000, deadline=1.0))])
    assert 20 < outcomes["a"].num_tokens < 1000
    assert outcomes["a"].last < 1.1


def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    outcomes = serve(make_policy(), [Arrival(0.0, ask("a", 8000, 10, deadline=0.3))])
    assert outcomes["a"].refusal.reason == "deadline"
