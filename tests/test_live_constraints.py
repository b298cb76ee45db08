"""Structured output over HTTP, from the default model."""

from __future__ import annotations

import json
import re

import jsonschema
import openai
import pytest
from live import LiveServer

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "sights": {"type": "array", "items": {"enum": ["river", "tower", "hill"]}, "maxItems": 3},
        "population": {"type": "integer", "minimum": 0, "maximum": 20_000_000},
    },
    "required": ["city", "country", "sights", "population"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
QUESTION = [{"role": "user", "content": "Describe Paris as JSON."}]


@pytest.fixture
def client(live: LiveServer):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **fields):
    fields = {"messages": QUESTION, "max_tokens": 200, "temperature": 1.0} | fields
    return client.chat.completions.create(model="smollm2-135m-instruct", **fields)


@pytest.fixture(autouse=True)
def nothing_was_compiled_and_nothing_is_left(live: LiveServer):
    yield
    assert live.metric("jaxserve_compilations_total") == 0
    live.wait_for_metric("jaxserve_open_sequences", 0)


def test_every_choice_satisfies_the_schema_streaming_or_not(client):
    texts = [choice.message.content for choice in ask(client, response_format=FORMAT, n=4).choices]
    chunks = list(ask(client, response_format=FORMAT, stream=True, seed=1))
    texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    assert chunks[-1].choices[0].finish_reason == "stop"
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) == 5


@pytest.mark.parametrize(
    "fields, pattern",
    [
        ({"structured_outputs": {"regex": "[A-Z]{3}-[0-9]{2}"}}, "[A-Z]{3}-[0-9]{2}"),
        ({"guided_choice": ["Paris", "London"]}, "Paris|London"),
        ({"guided_grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
    ],
)
def test_vllms_fields_are_kept_to(client, fields, pattern):
    reply = ask(client, extra_body=fields, logprobs=True)
    assert re.fullmatch(pattern, reply.choices[0].message.content)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_kept_to_is_a_400_in_words(client, fields, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        list(ask(client, extra_body=fields, stream=stream))
    assert caught.value.body["param"] == param


def test_what_turns_out_to_leave_no_token_is_a_400_and_ends_a_stream_with_an_error(client):
    fields = {"guided_regex": "abc", "min_tokens": 9}
    with pytest.raises(openai.BadRequestError, match="leaves no token to draw"):
        ask(client, extra_body=fields)
    with pytest.raises(openai.APIError, match="leaves no token to draw"):
        list(ask(client, extra_body=fields, stream=True))
