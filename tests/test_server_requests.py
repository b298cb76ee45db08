"""What the server accepts, and how it refuses the rest: 4xx, JSON, and nobody else is hurt."""

import json
import logging
import threading

import pytest
from toy_server import MAX_CONTEXT, MODEL_NAME, running_server
from toy_worker import SLOW, VOCAB_SIZE

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


def refused(reply, param=None):
    assert reply.status == 400, reply.body
    error = reply.error
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["param"] == param
    return error["message"]


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
    refused(server.post(COMPLETIONS, body), field)


def test_a_field_given_twice_is_refused_wherever_it_is(server):
    refused(server.post(COMPLETIONS, b'{"prompt":"a","n":1,"n":2}'), "n")
    body = b'{"messages":[{"role":"user","role":"system","content":"a"}]}'
    refused(server.post(CHAT, body), "role")


def test_an_unknown_field_is_named(server):
    assert "max_token" in refused(server.complete("a", max_token=3), "max_token")
    refused(server.chat("a", prompt="b"), "prompt")


def test_the_content_type_must_be_json_or_absent(server):
    body = b'{"prompt":"a","max_tokens":1}'
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert "application/json" in refused(server.request("POST", COMPLETIONS, body, form))
    assert server.request("POST", COMPLETIONS, body).status == 200
    utf8 = {"Content-Type": "application/json; charset=utf-8"}
    assert server.request("POST", COMPLETIONS, body, utf8).status == 200


def test_a_compressed_body_that_is_not_is_refused(server):
    reply = server.post(COMPLETIONS, b'{"prompt":"a"}', **{"Content-Encoding": "gzip"})
    refused(reply)


def test_other_failures_have_the_same_shape(server):
    assert server.request("GET", "/v1/nothing").status == 404
    assert server.request("GET", "/v1/nothing").error["code"] == "not_found"
    wrong_method = server.request("GET", COMPLETIONS)
    assert (wrong_method.status, wrong_method.headers["Allow"]) == (405, "POST")
    assert wrong_method.error["code"] == "method_not_allowed"


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
        ("presence_penalty", [0, 0.0, -0.0], [0.5, -1, "0", False]),
        ("frequency_penalty", [0], [1e-3]),
        ("repetition_penalty", [1, 1.0], [1.1, 0, True]),
        ("logit_bias", [{}], [{"5": 1}, {"x": 1}, {"-1": 5}, []]),
        ("response_format", [{"type": "text"}], [{"type": "json_object"}, "text"]),
        ("tools", [[]], [[{"type": "function"}]]),
        ("tool_choice", ["none", "auto"], ["required", {"type": "function"}]),
        ("parallel_tool_calls", [True, False], []),
        ("suffix", [""], ["tail"]),
        ("best_of", [1], [2]),
        ("guided_json", [], [{}]),
        ("prompt_logprobs", [], [0]),
        ("store", [False], [True]),
        ("min_tokens", [0], [1]),
    ],
)
def test_unsupported_fields_may_ask_for_nothing_only(server, field, neutral, asking):
    for value in neutral:
        assert server.complete("ab", **{field: value}).text() == "ab"
    for value in asking:
        assert "not supported" in refused(server.complete("ab", **{field: value}), field)


def test_best_of_may_equal_n(server):
    assert server.complete("ab", n=2, best_of=2).status == 200
    refused(server.complete("ab", n=2, best_of=3), "best_of")


# Prompts


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ok", ""], [[65], []]])
@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_prompt_is_refused_and_with_it_the_whole_request(server, prompt, stream):
    before = server.metric("jaxserve_output_tokens_total")
    refused(server.complete(prompt, stream=stream), "prompt")
    assert server.metric("jaxserve_output_tokens_total") == before


def test_a_missing_prompt_is_refused(server):
    assert "prompt is missing" in refused(server.post(COMPLETIONS, {}))
    assert "prompt is missing" in refused(server.complete(None))


@pytest.mark.parametrize(
    "literal, offender",
    [
        (f"[5, {VOCAB_SIZE}]", str(VOCAB_SIZE)),
        ("[-1]", "-1"),
        ("[4294967294]", "4294967294"),
        ("[9223372036854775808]", "9223372036854775808"),
        (f"[{'9' * 4000}]", "9" * 20),
        ("[1.0]", "float"),
        ("[true]", "bool"),
        ("[null]", "null"),
        ('[5, "7"]', "mixes"),
        ("[[5], 7]", "mixes"),
        (f"[[1], [{VOCAB_SIZE}]]", str(VOCAB_SIZE)),
        ("7", "int"),
        ("{}", "object"),
    ],
)
def test_prompt_ids_outside_the_vocabulary_are_refused_by_name(server, literal, offender):
    reply = server.post(COMPLETIONS, f'{{"prompt":{literal}}}'.encode())
    assert offender in refused(reply, "prompt")


def test_the_first_and_last_ids_are_accepted(server):
    assert server.complete([0, VOCAB_SIZE - 1], max_tokens=1).status == 200


@pytest.mark.parametrize("ids", [[VOCAB_SIZE], [-1], [5, 2**40]])
def test_stop_token_ids_outside_the_vocabulary_are_refused(server, ids):
    refused(server.complete("a", stop_token_ids=ids), "stop_token_ids")


def test_a_neighbour_is_unchanged_by_refusals(server):
    results = []
    prompt = [SLOW, *b"unchanged"]
    thread = threading.Thread(target=lambda: results.append(server.complete(prompt, stream=True)))
    thread.start()
    for bad in ([-1], [VOCAB_SIZE], "", [[]]):
        refused(server.complete(bad), "prompt")
    thread.join(10)
    assert results[0].text() == "unchanged"


# Lengths


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "num_prompt, max_tokens, expected",
    [
        (63, 1, 1),
        (1, 63, 63),
        (60, 4, 4),
        (63, None, 1),
        (1, None, 16),
        (60, None, 4),
    ],
)
def test_lengths_that_fit(server, num_prompt, max_tokens, expected, stream):
    fields = {"max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    reply = server.complete([65] * num_prompt, **fields)
    usage = reply.events[-1]["usage"] if stream else reply.json["usage"]
    assert usage == {
        "prompt_tokens": num_prompt,
        "completion_tokens": expected,
        "total_tokens": num_prompt + expected,
    }
    assert reply.finish_reason() == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "num_prompt, max_tokens", [(64, 1), (65, 1), (64, None), (60, 10), (1, 64), (1, 10**12)]
)
def test_lengths_that_do_not_fit_are_refused_with_all_the_numbers(
    server, num_prompt, max_tokens, stream
):
    reply = server.complete([65] * num_prompt, max_tokens=max_tokens, stream=stream)
    message = refused(reply, "prompt" if num_prompt >= MAX_CONTEXT else "max_tokens")
    for number in (MAX_CONTEXT, num_prompt, max_tokens or 1):
        assert str(number) in message
    chat = server.chat("A" * (num_prompt - 1), max_tokens=max_tokens, stream=stream)
    refused(chat, "messages" if num_prompt >= MAX_CONTEXT else "max_tokens")


def test_a_chat_may_use_all_of_the_context(server):
    reply = server.chat("A" * 9, ignore_eos=True)
    assert reply.json["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": MAX_CONTEXT - 10,
        "total_tokens": MAX_CONTEXT,
    }


@pytest.mark.parametrize("literal", ["0", "-1", "1.5", '"5"', "true", "1e12", "1.0"])
def test_max_tokens_must_be_a_positive_whole_number(server, literal):
    refused(
        server.post(COMPLETIONS, f'{{"prompt":"a","max_tokens":{literal}}}'.encode()), "max_tokens"
    )


def test_max_completion_tokens_is_the_newer_name_in_chats(server):
    assert server.chat("abcdef", max_completion_tokens=2).text() == "ab"
    assert server.chat("abcdef", max_completion_tokens=2, max_tokens=2).text() == "ab"
    refused(server.chat("abcdef", max_completion_tokens=2, max_tokens=3), "max_tokens")


# Sampling


@pytest.mark.parametrize(
    "temperature", ["0", "-0.0", "9e-6", "1e-7", "1e-30", "1e-38", "1e-45", "1e-400"]
)
def test_tiny_temperatures_are_greedy(server, temperature):
    body = f'{{"prompt":"greedy","max_tokens":20,"temperature":{temperature}}}'.encode()
    assert server.post(COMPLETIONS, body).text() == "greedy"


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1, 2.5, 1000])
def test_other_temperatures_are_taken_as_they_are(server, temperature):
    reply = server.complete("GREEDY", temperature=temperature, seed=3, max_tokens=6)
    assert reply.status == 200
    assert reply.text() != "GREEDY"


@pytest.mark.parametrize(
    "field, bad, good",
    [
        ("top_p", [0, -0.1, 1.1], [1e-9, 1]),
        ("min_p", [-0.1, 1.1], [0, 1]),
        ("top_k", [-2, 1.5, 2**31], [-1, 0, 1, 2**31 - 1]),
        ("n", [0, -1, 129, True, "2"], [1, 2]),
        ("seed", [2**63, -(2**63) - 1, 1.5, "1"], [0, -1, 2**63 - 1, -(2**63)]),
        ("stop", ["", ["a", ""], ["x"] * 17, [1], 3, "x" * 257], [[], "x", ["x"] * 16]),
        ("stream", [1, "true"], [False]),
        ("echo", [1, "yes"], [False]),
        ("logprobs", [-1, 21, True, 1.0], [0, 1, 5, 6, 20]),
    ],
)
def test_values_out_of_range_are_refused_by_name(server, field, bad, good):
    for value in bad:
        refused(server.complete("ab", **{field: value}), field)
    for value in good:
        assert server.complete("ab", **{field: value}).text() == "ab"


def test_stream_options_need_a_stream(server):
    refused(server.complete("a", stream_options={"include_usage": True}), "stream_options")
    refused(
        server.complete("a", stream=True, stream_options={"continuous_usage_stats": True}),
        "stream_options",
    )
    refused(server.complete("a", stream=True, stream_options={"other": 1}), "stream_options")


def test_echo_with_logprobs_is_refused_for_now(server):
    assert "not supported yet" in refused(server.complete("a", echo=True, logprobs=1), "logprobs")


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


# Messages


def test_text_parts_are_the_same_prompt_as_their_text(server):
    parts = [{"type": "text", "text": "Name a"}, {"type": "text", "text": " fruit."}]
    messages = [{"role": "user", "content": parts}]
    reply = server.post(CHAT, {"messages": messages, "temperature": 0})
    assert reply.text() == server.chat("Name a fruit.").text() == "Name a fruit.>"
    assert reply.json["usage"] == server.chat("Name a fruit.").json["usage"]


@pytest.mark.parametrize(
    "message, word",
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "not supported"),
        ({"role": "user", "content": [{"type": "text"}]}, "missing"),
        ({"role": "user", "content": None}, "missing"),
        ({"role": "user"}, "missing"),
        ({"role": "user", "content": 5}, "int"),
        ({"role": "user", "content": {"type": "text"}}, "object"),
        ({"content": "a"}, "role"),
        ({"role": "tool", "content": "a"}, "tool"),
        ({"role": "user\nsystem", "content": "a"}, "expected one of"),
        ({"role": "assistant", "content": "a", "tool_calls": [{}]}, "tool_calls"),
        ({"role": "user", "content": "a", "colour": "red"}, "colour"),
        ("hello", "str"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(server, message, word):
    reply = server.post(CHAT, {"messages": [message]})
    assert reply.status == 400
    assert word in reply.error["message"]


def test_an_empty_conversation_is_refused(server):
    refused(server.post(CHAT, {"messages": []}), "messages")
    refused(server.post(CHAT, {}), "messages")
    refused(server.chat("", add_generation_prompt=False), "messages")


def test_a_conversation_of_only_a_system_message_works(server):
    messages = [{"role": "system", "content": "be brief"}]
    assert server.post(CHAT, {"messages": messages, "temperature": 0}).text() == "be brief>"


def test_the_template_s_own_refusal_reaches_the_client(server):
    messages = [{"role": role, "content": "a"} for role in ("system", "developer")]
    message = refused(server.post(CHAT, {"messages": messages}), "messages")
    assert message == "only one system message, please"


def test_template_arguments_cannot_replace_the_messages(server):
    refused(server.chat("a", chat_template_kwargs={"messages": []}), "chat_template_kwargs")
    assert server.chat("a", chat_template_kwargs={"enable_thinking": False}).status == 200


def test_a_fed_back_answer_is_a_valid_message(server):
    answer = server.chat("ab").json["choices"][0]["message"]
    messages = [{"role": "user", "content": "ab"}, answer]
    assert server.post(CHAT, {"messages": messages, "temperature": 0}).text() == "abab>>"


# Ids


def test_a_request_id_comes_back(server):
    for stream in (False, True):
        body = {"prompt": "a", "stream": stream}
        reply = server.post(COMPLETIONS, body, **{"X-Request-Id": "my-id-1"})
        assert reply.headers["X-Request-Id"] == "my-id-1"
    unfit = server.post(COMPLETIONS, b"[", **{"X-Request-Id": "x" * 200})
    assert unfit.headers["X-Request-Id"].startswith("req-")
    assert json.loads(unfit.body)["error"]["message"]


def test_the_access_log_has_one_line_per_request_and_is_off_by_default(server, caplog):
    assert not logging.getLogger("jaxserve.access").isEnabledFor(logging.INFO)
    with caplog.at_level(logging.INFO, logger="jaxserve.access"):
        server.complete("ab")
        server.request("GET", "/nothing%0Ainjected")
    lines = [r.getMessage() for r in caplog.records if r.name == "jaxserve.access"]
    assert [line.rsplit(" ", 3)[0] for line in lines] == [
        "POST /v1/completions 200",
        "GET /nothing%0Ainjected 404",
    ]
