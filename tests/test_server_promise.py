"""What a client sees of the promise: refusals it can act on, its class, tenant and patience."""

from __future__ import annotations

import math

import pytest
from toy_model import ToyTokenizer
from toy_server import running_server, sse_lines, strict_json
from toy_worker import BUSY, OVERDUE, SLOW, VOCAB_SIZE

from jaxserve.frames import Stats
from jaxserve.server.answer import tenant
from jaxserve.server.client import WorkerClient
from jaxserve.server.generation import Limits, plan_completion
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


def planned(caller="", **fields):
    body = CompletionBody(prompt="abc", **fields)
    return plan_completion(body, ToyTokenizer(), LIMITS, caller).requests[0]


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
    assert tenant("") == ""
    assert tenant("Bearer secret") == tenant("Bearer secret") != tenant("Bearer other")
    assert "secret" not in tenant("Bearer secret")


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
        rung=3,
        prediction_error=0.02,
        refused={"late": 4, "full": 1},
        step_factors={"kv_reads": 1.25},
    )
    text = client.metrics.text().decode()
    for line in (
        "jaxserve_running_limit 77.0",
        "jaxserve_rung 3.0",
        "jaxserve_prediction_error 0.02",
        'jaxserve_refused_total{reason="late"} 4.0',
        'jaxserve_step_factor{term="kv_reads"} 1.25',
        "jaxserve_budget_use 0.25",
        "jaxserve_prefill_per_decode 5.0",
        "jaxserve_ttft_p95_seconds NaN",
    ):
        assert line in text.splitlines()


def test_a_window_knows_the_exact_percentile_of_the_last_minute():
    window = Window()
    for _ in range(100):
        window.add(100.0, now=0.0)
    for i in range(100):
        window.add(float(i), now=SECONDS + 10.0)
    assert window.percentile(95, now=SECONDS + 10.0) == 94.0
    assert window.percentile(50, now=SECONDS + 10.0) == 49.0
    assert math.isnan(window.percentile(95, now=3 * SECONDS))
