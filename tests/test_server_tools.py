"""Tool calls and reasoning over HTTP: what the model writes is what clients are told."""

from __future__ import annotations

import json
import re

import pytest
from tool_server import (
    CALLS_ONLY,
    HERMES,
    TOOLS,
    called,
    function,
    message,
    say,
    template,
    tool_server,
)
from toy_server import refusal, running_server

ARGUMENTS = '{"city": "Zürich", "days": [1, {"a": "\\"}</x>"}]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ADD = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def server():
    with tool_server(template(HERMES)) as server:
        yield server


def both_ways(server, script, **fields):
    """The reply in one piece; the stream is held to say the same."""
    whole, streamed = (say(server, script, **fields, stream=stream) for stream in (False, True))
    for index in range(fields.get("n", 1)):
        one, other = message(whole, index), message(streamed, index)
        assert called(whole, index) == called(streamed, index)
        assert {k: v for k, v in one.items() if k != "tool_calls"} == {
            k: v for k, v in other.items() if k != "tool_calls"
        }
        assert whole.finish_reason(index) == streamed.finish_reason(index)
    return whole


# What the model writes


def test_a_call_is_told_as_openai_tells_it(server):
    reply = both_ways(server, CALL)
    assert reply.finish_reason() == "tool_calls"
    answer = message(reply)
    assert answer.keys() == {"role", "content", "refusal", "tool_calls"}
    assert answer["content"] is None
    assert called(reply) == [("get_weather", ARGUMENTS)]
    assert re.fullmatch(r"call_[0-9a-f]{24}", answer["tool_calls"][0]["id"])


def test_text_before_and_several_calls(server):
    reply = both_ways(server, f"One moment.\n{CALL}\n{ADD}")
    assert message(reply)["content"] == "One moment."
    assert called(reply) == [("get_weather", ARGUMENTS), ("add", "{}")]


@pytest.mark.parametrize(
    "text", ["2 < 3 <tool", "<tool_call>nothing</tool_call>", '<tool_call>{"name": "get_weather", ']
)
def test_what_is_no_call_is_content(server, text):
    reply = both_ways(server, text)
    assert (message(reply)["content"], called(reply)) == (text, [])
    assert reply.finish_reason() == "stop"


def test_a_call_cut_short_keeps_what_came(server):
    reply = both_ways(server, CALL, max_tokens=len('{"name": "get_weather", "arguments": ') + 10)
    assert called(reply) == [("get_weather", ARGUMENTS[:8])]
    assert reply.finish_reason() == "length"


def test_only_one_call_may_come_where_the_client_says_so(server):
    reply = both_ways(server, f"{CALL}\n{ADD}", parallel_tool_calls=False)
    assert called(reply) == [("get_weather", ARGUMENTS)]
    assert reply.finish_reason() == "tool_calls"
    # It ends with the call, not with the answer the model would have given.
    assert reply.json["usage"]["completion_tokens"] < len(CALL.encode())
    assert server.becomes(server.is_idle)


def test_no_call_is_read_where_none_was_offered(server):
    for fields in ({"tool_choice": "none"}, {"tools": None}, {"tools": []}):
        reply = both_ways(server, CALL, skip_special_tokens=False, **fields)
        assert message(reply)["content"] == CALL


def test_a_stream_says_each_piece_as_it_is_written():
    with tool_server(template(CALLS_ONLY), "--step-seconds", "0.002") as server:
        events = say(server, "a" + CALL, stream=True).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1] == {"content": "a"}
    begin, *others = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert begin[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert len(others) > 10  # they come as they are written
    assert all(len(piece) == 1 for piece in others)
    assert deltas[-1] == {}


# Together with everything else


def test_a_stop_string_ends_a_call_like_any_text(server):
    reply = both_ways(server, CALL, stop="Zür")
    assert called(reply) == [("get_weather", '{"city": "')]
    reply = both_ways(server, f"{CALL}\nAnd then", stop="And")
    assert (called(reply), message(reply)["content"]) == ([("get_weather", ARGUMENTS)], None)
    assert reply.finish_reason() == "tool_calls"


def test_every_choice_reads_for_itself(server):
    reply = both_ways(server, CALL, n=3)
    assert [called(reply, index) for index in range(3)] == [[("get_weather", ARGUMENTS)]] * 3
    ids = [message(reply, index)["tool_calls"][0]["id"] for index in range(3)]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_all_tokens(server, stream):
    script = f"<think>Well.</think>So {ADD}"
    reply = say(server, script, logprobs=True, top_logprobs=1, stream=stream)
    choices = [choice["logprobs"] for choice in reply.choices(0) if choice["logprobs"]]
    tokens = [bytes(entry["bytes"]) for scores in choices for entry in scores["content"]]
    assert b"".join(tokens).decode() == script + "</s>"
    assert called(reply) == [("add", "{}")]


# Reasoning


def test_thoughts_come_apart_from_the_answer(server):
    reply = both_ways(server, "<think>\nHm, hm.\n</think>\n\nYes.")
    answer = message(reply)
    assert (answer["reasoning_content"], answer["reasoning"]) == ("Hm, hm.", "Hm, hm.")
    assert answer["content"] == "Yes."
    assert reply.finish_reason() == "stop"
    # The marks are a token each, and so is every other byte of the thoughts.
    details = reply.json["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("\nHm, hm.\n") + 2}


def test_thoughts_that_the_template_has_opened(server):
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = message(both_ways(server, f"So.</think>{ADD}", **thinks))
    assert (answer["reasoning_content"], answer["content"]) == ("So.", None)
    answer = message(both_ways(server, "So.</think>", chat_template_kwargs={}))
    assert (answer["content"], "reasoning" in answer) == ("So.</think>", False)


def test_thoughts_cut_short_are_thoughts(server):
    reply = both_ways(server, "<think>Hm, hm.</think>", max_tokens=4)
    assert (message(reply)["reasoning"], message(reply)["content"]) == ("Hm,", "")
    assert reply.finish_reason() == "length"
    assert reply.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_thoughts_can_be_left_out(server):
    reply = both_ways(server, "<think>Hm.</think>Yes.", include_reasoning=False)
    answer = message(reply)
    assert answer.keys() == {"role", "content", "refusal"}
    assert answer["content"] == "Yes."
    assert reply.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_completions_are_text_as_it_was_written(server):
    reply = server.complete("<think>a</think>b", skip_special_tokens=False, max_tokens=200)
    assert reply.text() == "<think>a</think>b"


# What the template gets


def shown(server, what, **fields):
    return json.loads(
        message(say(server, "x", chat_template_kwargs={"show": what}, **fields))["content"]
    )


def test_the_template_shows_tools_in_openais_form(server):
    bare = {"type": "function", "function": {"name": "f", "strict": False}}
    empty = {"type": "object", "properties": {}}
    assert shown(server, "tools", tools=[*TOOLS, bare]) == [
        *TOOLS,
        {"type": "function", "function": {"name": "f", "parameters": empty}},
    ]
    assert shown(server, "tools", tool_choice="none") is None


def test_a_conversation_with_calls_and_results_reaches_the_template(server):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "developer", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
    ]
    reply = server.post(
        "/v1/chat/completions",
        {"messages": turns, "temperature": 0, "chat_template_kwargs": {"show": "messages"}},
    )
    parsed = call | {"function": {"name": "add", "arguments": {"a": 1}}}
    assert json.loads(reply.text()) == [
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [parsed],
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "add"},
    ]


def test_an_effort_reaches_a_template_that_looks_at_it(server):
    fields = {"chat_template_kwargs": {"show": "effort"}, "reasoning_effort": "low"}
    assert message(say(server, "x", **fields))["content"] == "low"
    fields["chat_template_kwargs"] |= {"reasoning_effort": "high"}
    assert "send one" in refusal(say(server, "x", **fields), "reasoning_effort")


def test_tokenize_counts_the_tools(server):
    ask = {"messages": [USER], "chat_template_kwargs": {"show": "tools"}}
    counts = [
        server.post("/tokenize", ask | tools).json["count"] for tools in ({}, {"tools": TOOLS})
    ]
    assert counts[1] - counts[0] == len(json.dumps(TOOLS)) - len("null")


# Refusals


@pytest.mark.parametrize(
    "tools, place",
    [
        ([function("a b")], "tools[0].function.name"),
        ([function("")], "tools[0].function.name"),
        ([function("x" * 65)], "tools[0].function.name"),
        ([function("a"), function("a")], "tools[1].function.name"),
        ([function("a", parameters={"type": "array"})], "tools[0].function.parameters"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([function(f"f{i}") for i in range(129)], "at most 128"),
        ([function("a", parameters=[1])], "tools[0].function.parameters"),
        ([function("a", colour="red")], "colour"),
        ([{"type": "function", "name": "a"}], "tools[0].function"),
        ({"a": 1}, "array"),
    ],
)
def test_tools_that_are_no_functions_are_refused(server, tools, place):
    assert place in refusal(say(server, "x", tools=tools), "tools")


@pytest.mark.parametrize(
    "choice, tools",
    [
        ("any", TOOLS),
        ("required", None),
        ({"type": "function", "function": {"name": "other"}}, TOOLS),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, TOOLS),
        ({"type": "function"}, TOOLS),
        (7, TOOLS),
    ],
)
def test_choices_that_cannot_be_made_are_refused(server, choice, tools):
    refusal(say(server, "x", tool_choice=choice, tools=tools), "tool_choice")


def call(**fields):
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}} | fields


@pytest.mark.parametrize(
    "turns, place",
    [
        ([{"role": "tool", "content": "7"}], "messages[0].tool_call_id is missing"),
        ([{"role": "tool", "content": "7", "tool_call_id": "c"}], "tool_call_id is 'c', which no"),
        ([{"role": "function", "content": "7", "name": "f"}], "send role 'tool'"),
        ([USER | {"tool_calls": [call()]}], "messages[0].tool_calls is for the role 'assistant'"),
        ([USER | {"tool_call_id": "c1"}], "messages[0].tool_call_id is for the role 'tool'"),
        ([USER | {"reasoning": "Hm."}], "messages[0].reasoning is for the role 'assistant'"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content is missing"),
        ([{"role": "assistant", "tool_calls": [call(id=None)]}], "tool_calls[0].id is missing"),
        ([{"role": "assistant", "tool_calls": [call(type="custom")]}], "tool_calls[0].type"),
        ([{"role": "assistant", "tool_calls": [call(function=None)]}], "tool_calls[0].function"),
        (
            [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
            "messages[0].function_call is not supported",
        ),
        *(
            (
                [{"role": "assistant", "tool_calls": [call(function=f | {"name": "f"})]}],
                "messages[0].tool_calls[0].function.arguments is not an object",
            )
            for f in ({"arguments": "[1]"}, {"arguments": "{"}, {"arguments": "[" * 99_999})
        ),
    ],
)  # fmt: skip
def test_conversations_about_calls_that_make_no_sense_are_refused(server, turns, place):
    body = {"messages": [*turns, USER]}
    assert place in refusal(server.post("/v1/chat/completions", body), "messages")


@pytest.mark.parametrize(
    "field, value", [("functions", [{"name": "f"}]), ("function_call", {"name": "f"})]
)
def test_deprecated_fields_name_their_successors(server, field, value):
    assert "send tool" in refusal(say(server, "x", **{field: value}), field)


def test_a_model_that_knows_no_tools_refuses_them():
    with running_server() as server:
        assert "does not know tools" in refusal(say(server, "x"), "tools")
        assert say(server, "x", tool_choice="none").text() == "x>"
        assert "reasoning_effort" in refusal(
            server.chat("x", reasoning_effort="low"), "reasoning_effort"
        )
        result = {"role": "tool", "content": "7", "tool_call_id": "c"}
        reply = server.post("/v1/chat/completions", {"messages": [USER, result]})
        assert "does not know" in refusal(reply, "messages")


# Other families, and what the operator says


@pytest.mark.parametrize(
    "mark, script",
    [
        ("<|python_tag|>", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
        ("<|python_tag|>", '{"name": "add", "parameters": {"a": 1}}'),
        ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'),
        ("[TOOL_CALLS]", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
    ],
)
def test_other_families_write_calls_in_their_ways(mark, script):
    with tool_server(template(mark)) as server:
        reply = both_ways(server, script)
        assert called(reply) == [("add", '{"a": 1}')]
        assert message(both_ways(server, "<think>a</think>b"))["content"] == "ab"
        call_id = message(reply)["tool_calls"][0]["id"]
        assert (len(call_id) == 9 and call_id.isalnum()) == (mark == "[TOOL_CALLS]")


def test_the_operator_has_the_last_word():
    settings = {"tool_parser": "mistral", "reasoning_parser": "none"}
    with tool_server(template(HERMES), **settings) as server:
        assert called(both_ways(server, "[TOOL_CALLS]add{}")) == [("add", "{}")]
        assert message(both_ways(server, "<think>a"))["content"] == "a"
    with tool_server(template("<think>"), reasoning_parser="think") as server:
        assert message(server.chat("<think>a"))["reasoning"] == "a"
        assert "--tool-parser" in refusal(say(server, "x"), "tools")
    with tool_server(template(CALLS_ONLY), tool_parser="none") as server:
        assert "--tool-parser" in refusal(say(server, "x"), "tools")
