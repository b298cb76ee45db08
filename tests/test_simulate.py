"""The simulation itself, and what it says about the promise in the reference case."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from xml.etree import ElementTree

import pytest
from toy_promise import PROMISE, ROOFLINE, make_policy, make_scheduler

from jaxserve.cli import main
from jaxserve.errors import ConfigError
from jaxserve.sequence import Span
from jaxserve.simulate import (
    MIXES,
    POLICIES,
    REFERENCE,
    Bench,
    SimulatedDevice,
    VirtualClock,
    compare,
    find_capacity,
    measure,
    poisson,
    read_trace,
    run,
)
from jaxserve.simulate.chart import write_chart
from jaxserve.simulate.measure import percentile
from jaxserve.simulate.report import report

CAPACITY = 2.8
"""Requests a second in the reference mix, as the long simulation in bench/ finds it."""


def bench(mix: str = "reference", count: int = 400, **settings: float) -> Bench:
    return Bench(ROOFLINE, PROMISE, MIXES[mix], num_requests=count, **settings)


# Requests.


def test_the_requests_have_the_percentiles_and_the_rate_exactly():
    arrivals = poisson(REFERENCE, 1000, 4.0, seed=3)
    prompts = [len(arrival.request.prompt_ids) for arrival in arrivals]
    outputs = [arrival.request.sampling.max_tokens for arrival in arrivals]
    for lengths, p50, p95 in ((prompts, 800, 4000), (outputs, 200, 600)):
        assert percentile(lengths, 50) == pytest.approx(p50, rel=0.01)
        assert percentile(lengths, 95) == pytest.approx(p95, rel=0.02)
    assert max(prompts) == 8000
    assert statistics.mean(prompts) == pytest.approx(REFERENCE.workload.prompt_mean, rel=0.01)
    assert arrivals[-1].at == pytest.approx(1000 / 4.0)


def test_prompts_share_what_their_mix_says():
    shared = [a.request.prompt_ids for a in poisson(MIXES["shared-prompt"], 50, 1.0, seed=1)]
    assert len({prompt[:2000] for prompt in shared}) == 1
    assert len({prompt[2000] for prompt in shared}) == 50
    heavy = [a.request.prompt_ids for a in poisson(MIXES["decode-heavy"], 500, 1.0, seed=1)]
    assert len({prompt[:-32] for prompt in heavy}) <= 100
    assert len({prompt[-32:] for prompt in heavy}) == 500


def test_a_trace_is_read_in_order_and_scaled_to_a_rate(tmp_path):
    file = tmp_path / "trace.jsonl"
    line = {"prompt_tokens": 5, "output_tokens": 7, "tenant": "t", "service_class": "batch"}
    file.write_text("\n".join(json.dumps({"at": at, **line}) for at in (4.0, 1.0)))
    first, second = read_trace(file)
    assert (first.at, second.at) == (1.0, 4.0)
    assert first.request.tenant == "t" and first.request.service_class == "batch"
    assert read_trace(file, rate=2.0)[-1].at == 1.0


@pytest.mark.parametrize("text", ["", "{", '{"at": 1, "prompt_tokens": 3}', '{"when": 1}'])
def test_what_is_no_trace_is_refused(tmp_path, text):
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(file)


# The device and the loop.


def test_a_step_takes_as_long_as_the_roofline_says():
    clock = VirtualClock()
    scheduler = make_scheduler(POLICIES["unchunked"](ROOFLINE, PROMISE), clock)
    scheduler.add(poisson(REFERENCE, 1, 1.0, seed=1)[0].request)
    (span,) = scheduler.schedule()
    assert isinstance(span, Span) and span.num_tokens == 800
    assert SimulatedDevice(ROOFLINE).seconds([span]) == pytest.approx(
        ROOFLINE.prefill_seconds(800), rel=1e-6
    )


def test_noise_is_what_it_says_and_the_same_every_time():
    clock = VirtualClock()
    scheduler = make_scheduler(POLICIES["unchunked"](ROOFLINE, PROMISE), clock)
    scheduler.add(poisson(REFERENCE, 1, 1.0, seed=1)[0].request)
    spans = scheduler.schedule()
    quiet = SimulatedDevice(ROOFLINE).seconds(spans)
    devices = [SimulatedDevice(ROOFLINE, noise=0.1, seed=7) for _ in range(2)]
    first, second = ([device.seconds(spans) / quiet for _ in range(500)] for device in devices)
    assert first == second
    assert statistics.pstdev(first) == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_is_answered_in_full_or_refused_and_every_page_comes_back(name):
    clock = VirtualClock()
    scheduler = make_scheduler(POLICIES[name](ROOFLINE, PROMISE), clock, token_budget=16_384)
    arrivals = poisson(REFERENCE, 60, 6.0, seed=2)
    result = run(arrivals, scheduler, SimulatedDevice(ROOFLINE), clock)
    assert scheduler.pool.num_live == 0 and not scheduler.has_work
    for outcome in result.outcomes:
        wanted = outcome.arrival.request.sampling.max_tokens
        assert outcome.num_tokens == (0 if outcome.refusal else wanted)
    assert result.busy_seconds <= result.seconds
    one_by_one = sum(ROOFLINE.step_seconds(1) for _ in range(result.steps))
    assert result.busy_seconds >= one_by_one


def test_a_simulation_says_the_same_every_time():
    first, second = (bench(count=150, noise=0.05).serve(POLICIES["promise"], 4.0) for _ in range(2))
    assert first == second


def test_percentiles_are_values_that_occurred():
    assert percentile([3, 1, 2], 50) == 2
    assert percentile(range(1, 101), 95) == 95
    assert percentile([], 95) == 0


# The promise, in the reference case.


@pytest.mark.parametrize("load, count", [(0.5, 600), (1.0, 600), (3.0, 2000)])
def test_whoever_is_let_in_gets_what_was_promised_at_any_load(load, count):
    measured = bench(count=count).serve(POLICIES["promise"], load * CAPACITY)
    assert measured.ttft < 1.1 * PROMISE.ttft, "some misses of the warm-up fall into so short a run"
    assert measured.tpot < PROMISE.tpot
    if load == 0.5:
        assert measured.shed < 0.005
    assert measured.goodput >= 0.9 * min(load, 1) * CAPACITY, "no collapse"


def test_at_three_times_the_capacity_the_others_collapse():
    goodput = {
        name: bench(count=500).serve(POLICIES[name], 3 * CAPACITY).goodput for name in POLICIES
    }
    assert goodput["promise"] > 5 * max(goodput["fixed-chunk"], goodput["unchunked"], 0.5)
    assert goodput["static"] < 0.1


def test_half_as_much_again_as_the_capacity_is_served_better_than_by_the_others():
    goodput = {
        name: bench(count=500).serve(POLICIES[name], 1.5 * CAPACITY).goodput
        for name in ("unchunked", "fixed-chunk", "promise")
    }
    assert goodput["promise"] > 1.05 * goodput["fixed-chunk"] > goodput["unchunked"]


def test_noise_and_a_slower_device_than_the_seed_says_do_not_break_the_promise():
    slower = dataclasses.replace(ROOFLINE, mfu=0.45, overhead=0.001)
    clock = VirtualClock()
    scheduler = make_scheduler(make_policy(), clock)  # seeded with the faster one
    device = SimulatedDevice(slower, noise=0.1)
    result = run(poisson(REFERENCE, 500, 5.0, seed=1), scheduler, device, clock)
    measured = measure(result, PROMISE)
    assert measured.ttft < 1.1 * PROMISE.ttft and measured.tpot < PROMISE.tpot
    assert measured.goodput > 3


def test_where_prompts_are_cached_many_more_run_at_once():
    """Prompts gone, KV reads of the running ones are what TPOT leaves room for."""
    rows = {
        mix: bench(mix, count=count).serve(POLICIES["promise"], rate).rows_max
        for mix, count, rate in (("reference", 500, 2 * CAPACITY), ("decode-heavy", 2000, 24.0))
    }
    assert rows["decode-heavy"] > 2.5 * rows["reference"]


def test_a_shared_system_prompt_costs_little():
    alone = bench(count=250).serve(POLICIES["promise"], 2.0)
    shared = bench("shared-prompt", count=250).serve(POLICIES["promise"], 2.0)
    assert shared.goodput > 0.97 * alone.goodput
    assert shared.ttft < PROMISE.ttft


# What people see.


def test_the_capacity_is_where_the_promise_still_holds():
    capacity = find_capacity(bench(count=100), POLICIES["promise"], least=2.0)
    assert 2 <= capacity < 8
    assert bench(count=100).serve(POLICIES["promise"], capacity).keeps(PROMISE)
    assert find_capacity(bench(count=50), POLICIES["static"]) == 0


def test_the_report_has_a_row_for_each_policy_at_each_load_and_the_chart_a_curve(
    tmp_path,
):
    comparison = compare(bench(count=40), POLICIES, loads=(1, 2), capacity=2.0)
    lines = report(comparison).splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| ") and "x |" in line]
    assert Counter(row[3].strip() for row in rows) == dict.fromkeys(POLICIES, 2)
    write_chart(comparison, tmp_path / "loads.svg")
    svg = ElementTree.fromstring((tmp_path / "loads.svg").read_text())
    curves = svg.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert [curve.get("id") for curve in curves] == list(POLICIES)


def test_the_command_prints_json_and_draws(capsys, tmp_path):
    file = tmp_path / "loads.svg"
    command = "simulate --mix decode-heavy --requests 30 --loads 1,1.5 --capacity 5 --json --plot"
    out = tmp_path / "out.json"
    assert main([*command.split(), str(file), "--out", str(out)]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["mix"] == "decode-heavy" and comparison["loads"] == [1, 1.5]
    assert ElementTree.parse(file)
    summary = json.loads(out.read_text())
    assert summary["capacity_rps"] == 5
    assert list(summary["policies"]) == ["static", "unchunked", "fixed-chunk", "promise"]
    assert [load["offered_x"] for load in summary["loads"]] == [1, 1.5]
    ours = {key: value for key, value in summary["loads"][1].items() if key != "offered_x"}
    assert ours == summary["policies"]["promise"]
    assert ours["ttft_p95_ms"] == 1e3 * comparison["measured"]["promise"][1]["ttft"]
    assert ours["running_max"] >= ours["running_mean"] > 0
