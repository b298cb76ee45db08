"""Bodies, fields and headers: what is no request is refused with 4xx, in JSON, hurting nobody."""

import json
import logging

import pytest
from toy_model import MAX_CONTEXT, MODEL_NAME
from toy_server import refusal, running_server

from jaxserve.server.neutral import NEUTRAL
from jaxserve.server.openai import ChatBody, CompletionBody

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture(autouse=True)
def a_normal_request_still_works_and_nothing_is_left_behind(server):
    yield
    assert server.complete("still here").text() == "still here"
    assert server.request("GET", "/health").status == 200
    assert server.becomes(server.is_idle)


# Bodies that are no requests


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"  \n", id="blank"),
        pytest.param(b"[", id="cut off"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"prompt":"a"} x', id="something after it"),
        pytest.param(b'{"prompt":"\xff"}', id="no UTF-8"),
        pytest.param('{"prompt":"a"}'.encode("utf-16"), id="UTF-16"),
        pytest.param(b'{"prompt":"\\ud800"}', id="half a surrogate pair at the end"),
        pytest.param(b'{"prompt":"\\ud800abcdef"}', id="high surrogate alone"),
        pytest.param(b'{"prompt":"\\udc00abcdef"}', id="low surrogate alone"),
        pytest.param(b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="deep"),
        pytest.param(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="deep, unknown field"),
        pytest.param(b"[" * 100_000, id="deep and cut off"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_body_that_is_no_json_object_is_refused(server, path, body):
    assert server.post(path, body).status == 400
    assert server.post(path, body).error["message"]


@pytest.mark.parametrize(
    "field, literal",
    [
        (field, literal)
        for field in ("temperature", "top_p", "min_p")
        for literal in ("NaN", "Infinity", "-Infinity", "1e999", "-1", '"0.7"', "true", "[]", "{}")
    ],
)
def test_a_number_that_is_not_finite_negative_or_no_number_is_refused(server, field, literal):
    body = f'{{"prompt":"a","max_tokens":1,"{field}":{literal}}}'.encode()
    assert server.post(COMPLETIONS, body).status == 400
    assert field in server.post(COMPLETIONS, body).error["message"] or literal in (
        "NaN",
        "Infinity",
        "-Infinity",  # no JSON: the parser does not say which field it was in
    )


@pytest.mark.parametrize("digits", [20, 400, 5_000])
@pytest.mark.parametrize("field", ["max_tokens", "seed", "n", "top_k", "logprobs", "top_p"])
def test_huge_whole_numbers_are_refused(server, field, digits):
    body = f'{{"prompt":"a","{field}":{"9" * digits}}}'.encode()
    refusal(server.post(COMPLETIONS, body), field)


def test_a_field_given_twice_is_refused_wherever_it_is(server):
    refusal(server.post(COMPLETIONS, b'{"prompt":"a","n":1,"n":2}'), "n")
    body = b'{"messages":[{"role":"user","role":"system","content":"a"}]}'
    refusal(server.post(CHAT, body), "role")


def test_an_unknown_field_is_named(server):
    assert "max_token" in refusal(server.complete("a", max_token=3), "max_token")
    refusal(server.chat("a", prompt="b"), "prompt")


def test_the_content_type_must_be_json_or_absent(server):
    body = b'{"prompt":"a","max_tokens":1}'
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert "application/json" in refusal(server.request("POST", COMPLETIONS, body, form))
    assert server.request("POST", COMPLETIONS, body).status == 200
    utf8 = {"Content-Type": "application/json; charset=utf-8"}
    assert server.request("POST", COMPLETIONS, body, utf8).status == 200


def test_a_compressed_body_that_is_not_is_refused(server):
    reply = server.post(COMPLETIONS, b'{"prompt":"a"}', **{"Content-Encoding": "gzip"})
    refusal(reply)


def test_other_failures_have_the_same_shape(server):
    assert server.request("GET", "/v1/nothing").status == 404
    assert server.request("GET", "/v1/nothing").error["code"] == "not_found"
    wrong_method = server.request("GET", COMPLETIONS)
    assert (wrong_method.status, wrong_method.headers["Allow"]) == (405, "POST")
    assert wrong_method.error["code"] == "method_not_allowed"


@pytest.mark.parametrize("name", ["Authorization", "Cookie"])
def test_a_header_of_bytes_that_are_no_text_is_no_fault(server, name):
    headers = {"Content-Type": "application/json", name: b"Bearer \xff\xfe"}
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert server.request("POST", "/v1/completions", body, headers).status == 200


def test_a_body_over_the_limit_gets_413():
    with running_server(max_body_bytes=1000) as server:
        reply = server.complete("a" * 2000)
        assert reply.status == 413
        assert reply.error["code"] == "request_too_large"


# Null and neutral values


def test_null_is_the_same_as_absent(server):
    for kind, body, path in (
        (CompletionBody, {"prompt": "abc"}, COMPLETIONS),
        (ChatBody, {"messages": [{"role": "user", "content": "abc", "name": None}]}, CHAT),
    ):
        names = {*kind.__struct_fields__, *NEUTRAL} - set(body)
        reply = server.post(path, body | dict.fromkeys(names))
        assert reply.status == 200, reply.body


@pytest.mark.parametrize(
    "field, neutral, asking",
    [
        ("length_penalty", [1, 1.0], [1.1, 0, True]),
        ("tools", [[]], [[{"type": "function"}]]),
        ("tool_choice", ["none", "auto"], ["required", {"type": "function"}]),
        ("parallel_tool_calls", [True, False], []),
        ("suffix", [""], ["tail"]),
        ("best_of", [1], [2]),
        ("store", [False], [True]),
        ("typical_p", [1], [0.5]),
    ],
)
def test_unsupported_fields_may_ask_for_nothing_only(server, field, neutral, asking):
    for value in neutral:
        assert server.complete("ab", **{field: value}).text() == "ab"
    for value in asking:
        assert "not supported" in refusal(server.complete("ab", **{field: value}), field)


def test_best_of_may_equal_n(server):
    assert server.complete("ab", n=2, best_of=2).status == 200
    refusal(server.complete("ab", n=2, best_of=3), "best_of")


# Models


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_another_model_is_not_found(server, path):
    body = {"model": "gpt-9", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    del body["messages" if path == COMPLETIONS else "prompt"]
    reply = server.post(path, body)
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert MODEL_NAME in reply.error["message"]


def test_the_served_model_is_listed_and_accepted(server):
    listed = server.request("GET", "/v1/models").json["data"]
    assert [model["id"] for model in listed] == [MODEL_NAME]
    assert listed[0]["max_model_len"] == MAX_CONTEXT
    assert server.request("GET", f"/v1/models/{MODEL_NAME}").json == listed[0]
    assert server.request("GET", "/v1/models/other").error["code"] == "model_not_found"
    assert server.complete("ab", model=MODEL_NAME).json["model"] == MODEL_NAME


# Ids


def test_a_request_id_comes_back(server):
    for stream in (False, True):
        body = {"prompt": "a", "stream": stream}
        reply = server.post(COMPLETIONS, body, **{"X-Request-Id": "my-id-1"})
        assert reply.headers["X-Request-Id"] == "my-id-1"
    unfit = server.post(COMPLETIONS, b"[", **{"X-Request-Id": "x" * 200})
    assert unfit.headers["X-Request-Id"].startswith("req-")
    assert json.loads(unfit.body)["error"]["message"]


def test_the_access_log_has_one_line_of_json_per_request_and_is_off_by_default(server, caplog):
    assert not logging.getLogger("jaxserve.access").isEnabledFor(logging.INFO)
    with caplog.at_level(logging.INFO, logger="jaxserve.access"):
        body = {"prompt": "ab", "temperature": 0, "n": 2, "user": "ann"}
        reply = server.post(COMPLETIONS, body, **{"X-Request-Id": "my-id-2"})
        server.post(COMPLETIONS, b"[")
        server.request("GET", "/nothing%0Ainjected")
    lines = [r.getMessage() for r in caplog.records if r.name == "jaxserve.access"]
    good, bad, strange = map(json.loads, lines)
    assert (good["method"], good["path"], good["status"]) == ("POST", COMPLETIONS, 200)
    assert (good["request_id"], good["client"]) == ("my-id-2", "127.0.0.1")
    found = good["generated"]
    assert found["answer_id"] == reply.json["id"]
    assert (found["tenant"], found["service_class"], found["stream"]) == (
        "ann",
        "interactive",
        False,
    )
    assert (found["choices"], found["prompt_tokens"], found["output_tokens"]) == (2, 2, 6)
    assert found["finish_reasons"] == ["stop", "stop"]
    assert 0 <= found["queue_seconds"] <= found["ttft_seconds"] <= good["seconds"]
    assert found["tpot_seconds"] >= 0
    assert bad["status"] == 400 and "generated" not in bad
    assert (strange["path"], strange["status"]) == ("/nothing%0Ainjected", 404)
