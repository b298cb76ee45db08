"""Structured output as clients ask for it: what becomes of each field, and what is refused."""

from __future__ import annotations

import json

import pytest
from tool_server import HERMES, TOOLS, message, say, template, tool_server
from toy_server import refusal, running_server, sse_lines
from toy_worker import IMPOSSIBLE, SLOW

from jaxserve.errors import RequestError
from jaxserve.request import MAX_CONSTRAINT_BYTES, Constraint
from jaxserve.server.constraint import ANY_OBJECT, Asked, asked_constraint
from jaxserve.server.openai import ChatBody, CompletionBody, decode_body

SCHEMA = {"type": "object", "properties": {"ü": {"type": "integer", "maximum": 1e3}}}
ANY = Constraint("json_schema", ANY_OBJECT)


def asked(kind: type, **fields: object) -> Asked | None:
    return asked_constraint(decode_body(json.dumps(fields).encode(), kind))


both_endpoints = pytest.mark.parametrize("kind", [CompletionBody, ChatBody])


@both_endpoints
@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"response_format": {"type": "json_object"}}, ANY),
        ({"structured_outputs": {"json_object": True}}, ANY),
        ({"structured_outputs": {"regex": "a+"}}, Constraint("regex", "a+")),
        ({"guided_regex": "a+"}, Constraint("regex", "a+")),
        (
            {"structured_outputs": {"choice": ["a", 'b"']}},
            Constraint("lark", r'start: "a" | "b\""'),
        ),
        ({"guided_choice": ["a"]}, Constraint("lark", 'start: "a"')),
        ({"structured_outputs": {"grammar": "start: A"}}, Constraint("lark", "start: A")),
        ({"guided_grammar": "start: A"}, Constraint("lark", "start: A")),
        ({"guided_json": "{}"}, Constraint("json_schema", "{}")),
        (
            {"guided_json": {}, "guided_whitespace_pattern": " "},
            Constraint("json_schema", "{}", " "),
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            Constraint("json_schema", "{}", " "),
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            Constraint("json_schema", "{}", ""),
        ),
    ],
)
@pytest.mark.parametrize("backend", [None, "auto", "guidance", "llguidance"])
def test_every_way_to_ask_leads_to_a_constraint(kind, fields, expected, backend):
    found = asked(kind, guided_decoding_backend=backend, **fields)
    assert found is not None and found.constraint == expected
    assert found.param in fields


@both_endpoints
def test_a_schema_is_passed_on_as_it_is_however_it_was_sent(kind):
    named = {"name": "x", "schema": SCHEMA, "strict": True, "description": "y"}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
    ):
        found = asked(kind, **fields)
        assert found is not None and found.constraint.kind == "json_schema"
        assert json.loads(found.constraint.text) == SCHEMA


@both_endpoints
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "disable_any_whitespace": False}},
        {"guided_decoding_backend": "auto"},
    ],
)
def test_what_asks_for_nothing_leaves_the_answer_free(kind, fields):
    assert asked(kind, **fields) is None


REFUSED = [
    ("response_format", {"response_format": {"type": "structural_tag"}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    ("response_format", {"response_format": {"type": "text", "json_schema": {"schema": {}}}}),
    ("response_format", {"response_format": "text"}),
    ("structured_outputs", {"structured_outputs": {"structural_tag": "{}"}}),
    ("structured_outputs", {"structured_outputs": {"disable_additional_properties": True}}),
    ("structured_outputs", {"structured_outputs": {"kind": "json"}}),
    ("structured_outputs", {"structured_outputs": {"json": {}, "regex": "a"}}),
    ("structured_outputs", {"structured_outputs": {"choice": []}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}),
    (
        "structured_outputs",
        {
            "structured_outputs": {
                "json": {},
                "whitespace_pattern": " ",
                "disable_any_whitespace": True,
            }
        },
    ),
    ("guided_regex", {"response_format": {"type": "json_object"}, "guided_regex": "a"}),
    ("guided_regex", {"guided_json": {}, "guided_regex": "a"}),
    ("guided_regex", {"guided_regex": ""}),
    ("guided_regex", {"guided_regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}),
    ("guided_choice", {"guided_choice": ["a", ""]}),
    ("guided_choice", {"guided_choice": "a"}),
    ("guided_grammar", {"guided_grammar": ""}),
    ("guided_json", {"guided_json": ""}),
    ("guided_json", {"guided_json": [1]}),
    ("guided_whitespace_pattern", {"guided_whitespace_pattern": " "}),
    ("guided_whitespace_pattern", {"guided_regex": "a", "guided_whitespace_pattern": " "}),
    ("guided_decoding_backend", {"guided_decoding_backend": "xgrammar", "guided_regex": "a"}),
    ("ignore_eos", {"guided_regex": "a", "ignore_eos": True}),
]


@both_endpoints
@pytest.mark.parametrize("param, fields", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(kind, param, fields):
    with pytest.raises(RequestError) as caught:
        asked(kind, **fields)
    assert caught.value.param == param and str(caught.value)


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


def test_what_the_engine_finds_impossible_is_a_400_that_names_the_field(server):
    for fields in ({}, {"stream": True}):
        reply = server.complete([IMPOSSIBLE], guided_regex="a", **fields)
        assert "cannot follow the grammar" in refusal(reply, "guided_regex")
    assert server.becomes(server.is_idle)


def test_what_turns_out_to_be_impossible_ends_a_stream_with_an_error(server):
    reply = server.complete([ord("a"), SLOW, IMPOSSIBLE], guided_regex="a", stream=True)
    assert reply.status == 200
    *_, last = sse_lines(reply.body)
    error = json.loads(last)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "guided_regex")
    assert server.becomes(server.is_idle)


def test_a_grammar_of_the_clients_own_leaves_no_room_for_thoughts_and_calls():
    held = {"tools": None, "guided_choice": ["<think>a"], "skip_special_tokens": False}
    with tool_server(template(HERMES)) as server:
        assert message(say(server, "<think>a", **held))["content"] == "<think>a"
        opened = say(server, "a", **held, chat_template_kwargs={"enable_thinking": True})
        assert "has opened" in refusal(opened, "guided_choice")
        with_tools = say(server, "a", **held | {"tools": TOOLS})
        assert "cannot go with tools" in refusal(with_tools, "guided_choice")
