"""The official client library with tools and reasoning: what it makes of our answers."""

from __future__ import annotations

import json

import pytest
from tool_server import HERMES, TOOLS, template, tool_server
from toy_model import MODEL_NAME
from toy_server import TIMEOUT

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client():
    with tool_server(template(HERMES)) as server:
        base_url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(
            base_url=base_url, api_key="unused", timeout=TIMEOUT, max_retries=0
        ) as client:
            yield client


def ask(script: str, **fields):
    messages = [{"role": "user", "content": script}]
    return {"model": MODEL_NAME, "messages": messages, "temperature": 0, "tools": TOOLS} | fields


def test_a_call_streamed_and_not(client):
    script = f"<think>Hm.</think>Wait.\n{CALL}\n{CALL}"
    whole = client.chat.completions.create(**ask(script)).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert (whole.message.content, whole.message.reasoning_content) == ("Wait.", "Hm.")
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert calls == [("get_weather", '{"city": "Rome"}')] * 2

    with client.chat.completions.stream(**ask(script)) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "Wait."
    assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls] == calls


def test_a_conversation_goes_on_with_the_result(client):
    answer = client.chat.completions.create(**ask(f"<think>Hm.</think>{CALL}")).choices[0].message
    (call,) = answer.tool_calls
    messages = [
        {"role": "user", "content": "The weather in Rome?"},
        answer,  # as it came, thoughts and all
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "clear"})},
        {"role": "user", "content": "It is clear."},
    ]
    reply = client.chat.completions.create(**ask("") | {"messages": messages})
    assert reply.choices[0].message.content == "It is clear."
    assert reply.choices[0].message.tool_calls is None


def test_what_cannot_be_is_the_library_s_bad_request(client):
    with pytest.raises(openai.BadRequestError, match="not among tools") as refused:
        choice = {"type": "function", "function": {"name": "other"}}
        client.chat.completions.create(**ask("x", tool_choice=choice))
    assert refused.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match="no call before it") as refused:
        result = {"role": "tool", "tool_call_id": "c1", "content": "7"}
        client.chat.completions.create(**ask("x") | {"messages": [result]})
    assert refused.value.param == "messages"


class GetWeather(pydantic.BaseModel):
    """The weather of a place."""

    city: str


def test_functions_as_pydantic_models(client):
    tools = [openai.pydantic_function_tool(GetWeather)]
    script = CALL.replace("get_weather", "GetWeather")
    reply = client.chat.completions.parse(**ask(script, tools=tools)).choices[0].message
    assert reply.tool_calls[0].function.parsed_arguments == GetWeather(city="Rome")
    messages = [{"role": "user", "content": "x"}, reply]
    messages += [{"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "sun"}]
    messages += [{"role": "user", "content": "done"}]
    again = client.chat.completions.parse(**ask("") | {"messages": messages, "tools": tools})
    assert again.choices[0].message.content == "done"
