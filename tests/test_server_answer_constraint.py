"""Calls that have to come, or to follow their schemas: the grammar that goes to the engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from text_toys import bytes_and
from tool_server import (
    HERMES,
    MARKS,
    TOOLS,
    called,
    function,
    say,
    template,
    tool_server,
    tool_tokenizer,
)
from toy_server import refusal
from toy_worker import EOS, VOCAB_SIZE

from jaxserve.request import MAX_CONSTRAINT_BYTES
from jaxserve.server.generation import plan_chat
from jaxserve.server.limits import Limits
from jaxserve.server.openai import ChatBody, decode_body
from jaxserve.server.reading import model_habits

LIMITS = Limits(vocab_size=VOCAB_SIZE, max_context=8192, max_sequences=8, eos_ids=(EOS,))
TEMPLATE = template(HERMES)
TOKENIZER = tool_tokenizer(TEMPLATE)
STRICT = function("strict", strict=True)
NAMED = {"type": "function", "function": {"name": "add"}}


def grammar(**fields) -> LLMatcher | None:
    """What the engine is told of a chat's answers."""
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS} | fields
    habits = model_habits("auto", "auto", TEMPLATE)
    plan = plan_chat(
        decode_body(json.dumps(body).encode(), ChatBody), TOKENIZER, LIMITS, habits=habits
    )
    constraints = {request.sampling.constraint for request in plan.requests}
    assert len(constraints) == 1  # the same for every choice
    (constraint,) = constraints
    if constraint is None:
        return None
    assert constraint.kind == "lark"
    library = LLTokenizer(bytes_and(*MARKS).to_str(), n_vocab=VOCAB_SIZE, eos_token=EOS)
    made = LLMatcher(library, constraint.text, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(text: str, **fields) -> bool:
    made = grammar(**fields)
    assert made is not None
    return all(made.consume_token(i) for i in TOKENIZER.encode(text, param="")) and (
        made.is_accepting()
    )


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_calls_that_need_not_come_leave_the_answer_free():
    assert grammar() is None
    assert grammar(tools=None) is None
    assert grammar(tools=[STRICT], tool_choice="none") is None


def test_a_required_call_follows_the_schema_of_its_function():
    required = {"tool_choice": "required", "n": 2}
    assert accepts(call("get_weather", '{"city": "Rome"}'), **required)
    assert accepts(call("add") + "\n" + call("add"), **required)
    assert accepts(f"<think>\nWhich?\n</think>\n\n{call('add')}", **required)
    assert not accepts(call("add") + "\n" + call("add"), parallel_tool_calls=False, **required)
    assert not accepts(call("get_weather", '{"city": 7}'), **required)
    assert not accepts("No.", **required)
    assert not accepts("", **required)


def test_a_named_function_is_called_once():
    assert accepts(call("add"), tool_choice=NAMED)
    assert not accepts(call("get_weather"), tool_choice=NAMED)
    assert not accepts(call("add") + "\n" + call("add"), tool_choice=NAMED)


def test_thoughts_the_prompt_has_opened_come_first():
    fields = {"tool_choice": NAMED, "chat_template_kwargs": {"enable_thinking": True}}
    assert accepts(f"Hm.</think>\n{call('add')}", **fields)
    assert not accepts(call("add"), **fields)


def test_strict_functions_are_called_as_they_say_and_others_as_they_come():
    fields = {"tools": [STRICT, function("loose")]}
    assert accepts("Just text.", **fields)
    assert accepts("Well. " + call("loose", '{"city": 7}'), **fields)
    assert accepts("Well. " + call("strict", '{"city": "Rome"}'), **fields)
    assert not accepts("Well. " + call("strict", '{"city": 7}'), **fields)
    assert not accepts("Well. " + call("unknown"), **fields)


def test_the_readmes_request_makes_the_model_call_the_function():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (body,) = re.findall(r"^```json\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    request = json.loads(body)
    assert accepts(call("get_weather", '{"city": "Oslo", "unit": "C"}'), **request)
    assert not accepts(call("get_weather", '{"city": "Oslo"}'), **request)
    assert not accepts("Yes.", **request)


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_function_may_have_no_parameters_or_say_nothing_of_them(parameters):
    fields = {"tools": [function("f", parameters=parameters)], "tool_choice": "required"}
    assert accepts(call("f"), **fields)
    assert accepts(call("f", '{"a": 1}'), **fields) == (parameters == {})


PERSON = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}


def test_content_of_a_form_may_come_in_place_of_a_call():
    assert accepts('{"a": 1}', response_format=FORMAT)
    assert accepts(call("add"), response_format=FORMAT)
    assert not accepts("Well.", response_format=FORMAT)
    assert not accepts('{"a": 1}', response_format=FORMAT, tool_choice="required")
    spaced = {"response_format": FORMAT, "guided_whitespace_pattern": "[ \n]{0,2}"}
    assert accepts('{ "a":\n1}', **spaced)
    assert accepts("12/3", guided_regex="[0-9]+/[0-9]")


def test_content_of_a_form_comes_after_the_thoughts():
    opened = {"tools": None, "chat_template_kwargs": {"enable_thinking": True}}
    assert accepts('Hm.</think>\n\n{"a": 1}', response_format=FORMAT, **opened)
    assert accepts('<think>Hm.</think>{"a": 1}', response_format=FORMAT, tools=None)
    assert accepts('{"a": 1}', response_format=FORMAT, tools=None)
    assert accepts("yes", guided_choice=["yes", "no"], tools=None)


def test_what_cannot_go_together_is_refused():
    with tool_server(TEMPLATE) as server:
        assert called(say(server, call("add"), tool_choice="required")) == [("add", "{}")]
        large = function("large", parameters={"type": "object", "x": "x" * MAX_CONSTRAINT_BYTES})
        refused = say(server, "x", tools=[large], tool_choice="required")
        assert "bytes" in refusal(refused, "tools")
        refused = say(server, "x", tool_choice="required", ignore_eos=True)
        assert "ends where" in refusal(refused, "ignore_eos")
        refused = say(server, "x", guided_choice=["yes", "no"])
        assert "cannot go with tools" in refusal(refused, "guided_choice")
        refused = say(server, "x", guided_json="[1", tools=TOOLS)
        assert "no JSON schema" in refusal(refused, "guided_json")
