"""A real engine made to call functions: random weights, and every call fits its schema."""

from __future__ import annotations

import json

import jsonschema
import pytest
from checkpoint_toys import copy_folder
from engines import TINY
from live import live_server
from text_toys import EOS, bytes_and
from tool_server import CALLS_ONLY, MARKS, template

openai = pytest.importorskip("openai")

EOS_ID = 256
PARAMETERS = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F", "Kelvin"]},
        "days": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
        "exact": {"type": "boolean"},
    },
    "required": ["unit", "days", "exact"],
    "additionalProperties": False,
}
NAMES = ("get_weather", "get_tides")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    copy_folder(TINY / "qwen3-qknorm", folder, config={"eos_token_id": EOS_ID})
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").write_text(bytes_and(*MARKS).to_str())
    config = {"chat_template": template(CALLS_ONLY), "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sizes = ["--max-rows", "4", "--token-budget", "16", "--max-context", "512"]
    with live_server(str(folder), *sizes) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0)


def ask(**fields):
    messages = [{"role": "user", "content": "The weather and the tides?"}]
    return {"model": "tiny", "messages": messages, "tools": TOOLS, "n": 4} | fields


def check(calls) -> list[str]:
    """The functions called, each as it says it has to be."""
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    return [call.function.name for call in calls]


def test_required_calls_come_and_fit_their_schemas(client):
    names = []
    for seed in range(3):
        fields = ask(tool_choice="required", parallel_tool_calls=False, seed=seed)
        for choice in client.chat.completions.create(**fields).choices:
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            found = check(choice.message.tool_calls)
            assert len(found) == 1
            names += found
    assert set(names) == set(NAMES)


def test_a_named_function_is_the_one_that_is_called(client):
    named = {"type": "function", "function": {"name": "get_tides"}}
    reply = client.chat.completions.create(**ask(tool_choice=named, temperature=0, n=1))
    assert check(reply.choices[0].message.tool_calls) == ["get_tides"]


def test_a_stream_says_the_same(client):
    fields = ask(tool_choice="required", parallel_tool_calls=False, seed=7, n=1)
    whole = client.chat.completions.create(**fields).choices[0].message
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0].message
    calls = [[call.function for call in m.tool_calls] for m in (whole, streamed)]
    assert [(f.name, f.arguments) for f in calls[0]] == [(f.name, f.arguments) for f in calls[1]]


def test_a_schema_that_cannot_be_followed_is_a_bad_request(client):
    impossible = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": impossible}}
    with pytest.raises(openai.BadRequestError, match="cannot be used") as refused:
        client.chat.completions.create(**ask(tools=[tool], tool_choice="required"))
    assert refused.value.param == "tools"
