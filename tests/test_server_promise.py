"""What a client sees of the promise: refusals it can act on, its class, tenant and patience."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from toy_model import ToyTokenizer
from toy_server import running_server, sse_lines, strict_json
from toy_worker import BUSY, OVERDUE, SLOW, VOCAB_SIZE

from jaxserve.frames import Stats
from jaxserve.server.client import WorkerClient
from jaxserve.server.generation import Limits, plan_completion
from jaxserve.server.keys import Caller, anonymous
from jaxserve.server.metrics import FIRST_TOKEN_BUCKETS, NEXT_TOKEN_BUCKETS, Timeline
from jaxserve.server.openai import CompletionBody
from jaxserve.server.window import SECONDS, Window


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_not_let_in_gets_429_and_when_to_come_again(server, stream):
    reply = server.complete([BUSY], stream=stream)
    assert (reply.status, reply.headers["Retry-After"]) == (429, "7")
    assert reply.error["type"] == "rate_limit_error"
    assert reply.error["code"] == "rate_limit_exceeded"
    assert reply.error["message"] == "the toy is busy: try again in 7 s"
    assert server.becomes(server.is_idle)


@pytest.mark.parametrize(("token", "reason"), [(BUSY, "late"), (OVERDUE, "deadline")])
def test_what_was_refused_is_counted_by_reason(server, token, reason):
    name = f'jaxserve_refused_total{{reason="{reason}"}}'
    before = server.metric(name)
    server.complete([token], n=3)
    assert server.metric(name) == before + 3


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_samples_one_that_is_not_let_in_refuses_them_all(server, stream):
    reply = server.complete([BUSY], n=3, stream=stream)
    assert (reply.status, reply.headers["Retry-After"]) == (429, "7")
    assert server.becomes(server.is_idle)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_passes_before_the_first_token_is_504(server, stream):
    reply = server.complete([OVERDUE], stream=stream)
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    assert "deadline of 1 s" in reply.error["message"]


def test_a_deadline_that_passes_later_ends_the_stream_with_an_error_event(server):
    reply = server.complete([*b"ab", SLOW, SLOW, OVERDUE], stream=True)
    *events, last = sse_lines(reply.body)
    assert reply.status == 200 and events
    assert "deadline" in strict_json(last.encode())["error"]["message"]


LIMITS = Limits(VOCAB_SIZE, max_context=64, max_sequences=8, eos_ids=())


def planned(caller="", limits=LIMITS, **fields):
    body = CompletionBody(prompt="abc", **fields)
    return plan_completion(body, ToyTokenizer(), limits, Caller(caller)).requests[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "interactive"),
        ({"service_tier": "auto"}, "interactive"),
        ({"service_tier": "priority", "priority": 5}, "interactive"),
        ({"service_tier": "flex"}, "batch"),
        ({"service_tier": "batch"}, "batch"),
        ({"priority": 0}, "interactive"),
        ({"priority": -3}, "interactive"),
        ({"priority": 1}, "batch"),
    ],
)
def test_the_class_comes_from_tier_or_priority(fields, expected):
    assert planned(**fields).service_class == expected


def test_the_user_is_the_tenant_and_without_one_the_key_is(server):
    assert planned("key", user="ann").tenant == "ann"
    assert planned("key").tenant == "key"
    assert anonymous("") == ""
    assert anonymous("Bearer secret") == anonymous("Bearer secret") != anonymous("Bearer other")
    assert "secret" not in anonymous("Bearer secret")


def test_computed_prompts_are_shared_by_salt_and_by_key_unless_keys_share_them():
    def salt(key, salt=None, *, limits=LIMITS):
        return planned(key, limits, cache_salt=salt).cache_salt

    assert salt("ann") == salt("ann")
    different = [salt("ann"), salt("bob"), salt(""), salt("ann", "x"), salt("bob", "x")]
    assert len(set(different)) == len(different)
    shared = replace(LIMITS, shared_cache=True)
    assert salt("ann", limits=shared) == salt("bob", limits=shared) == salt("")
    assert salt("ann", "x", limits=shared) == salt("bob", "x", limits=shared) != salt("ann")


def test_the_timeout_is_the_deadline():
    assert planned(timeout=2.5).deadline == 2.5
    assert planned().deadline is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("service_tier", "first"), ("timeout", 0), ("timeout", -1), ("priority", "high")],
)
def test_a_standing_that_is_none_is_refused(server, field, value):
    reply = server.complete("ab", **{field: value})
    assert (reply.status, reply.error["param"]) == (400, field)


def test_the_worker_s_numbers_are_metrics():
    client = WorkerClient()
    client.metrics.worker = Stats(
        steps=10,
        step_tokens=640,
        token_budget=256,
        prompt_tokens=500,
        output_tokens=100,
        running_limit=77,
        rung=2,
        prediction_error=0.02,
        rows=9,
        preemptions=5,
        swaps=2,
        asked_tokens=400,
        found_tokens=100,
        pages_total=80,
        pages_live=20,
        step_factors={"kv_reads": 1.25},
    )
    text = client.metrics.text().decode()
    for line in (
        "jaxserve_running_limit 77.0",
        "jaxserve_rung 2.0",
        "jaxserve_prediction_error 0.02",
        "jaxserve_rows 9.0",
        'jaxserve_preemptions_total{way="swap"} 2.0',
        'jaxserve_preemptions_total{way="recompute"} 3.0',
        "jaxserve_prefix_hit_rate 0.25",
        "jaxserve_kv_use 0.25",
        'jaxserve_refused_total{reason="late"} 0.0',
        'jaxserve_step_factor{term="kv_reads"} 1.25',
        "jaxserve_budget_use 0.25",
        "jaxserve_prefill_per_decode 5.0",
        "jaxserve_ttft_p95_seconds NaN",
    ):
        assert line in text.splitlines()


def test_time_in_the_queue_is_that_in_the_server_and_that_in_the_worker():
    metrics = WorkerClient().metrics
    timeline = Timeline(arrived=10.0, submitted=10.5)
    metrics.token(timeline, now=12.0, queued=0.75)
    metrics.token(timeline, now=12.25)
    metrics.token(timeline, now=12.75)
    metrics.finished(timeline)
    lines = metrics.text().decode().splitlines()
    for line in (
        "jaxserve_queue_seconds_sum 1.25",
        "jaxserve_time_to_first_token_seconds_sum 2.0",
        "jaxserve_inter_token_seconds_sum 0.75",
        "jaxserve_time_per_output_token_seconds_sum 0.375",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("buckets", "promise"), [(FIRST_TOKEN_BUCKETS, 0.5), (NEXT_TOKEN_BUCKETS, 0.033)]
)
def test_buckets_are_dense_around_the_promise(buckets, promise):
    assert promise in buckets
    near = [edge for edge in buckets if 0.8 * promise <= edge <= 1.25 * promise]
    assert len(near) >= 5
    assert all(after / before <= 1.15 for before, after in pairwise(near))


def test_a_window_knows_the_exact_percentile_of_the_last_minute():
    window = Window()
    for _ in range(100):
        window.add(100.0, now=0.0)
    for i in range(100):
        window.add(float(i), now=SECONDS + 10.0)
    assert window.percentile(95, now=SECONDS + 10.0) == 94.0
    assert window.percentile(50, now=SECONDS + 10.0) == 49.0
    assert math.isnan(window.percentile(95, now=3 * SECONDS))
