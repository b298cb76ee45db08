"""/v1/responses: answers whole and streamed, conversations remembered, and what is refused."""

import asyncio
import json
from types import SimpleNamespace

import openai
import pytest
from tool_server import HERMES, template, tool_server
from toy_model import MODEL_NAME
from toy_server import refusal, running_server
from toy_worker import DIE, SLOW

from jaxserve.errors import NotFound
from jaxserve.server import response_store
from jaxserve.server.keys import Keys
from jaxserve.server.response_store import ResponseStore, StoredResponse, Turn

PATH = "/v1/responses"
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def tools():
    with tool_server(template(HERMES)) as server:
        yield server


@pytest.fixture(autouse=True)
def a_normal_request_still_works_and_nothing_is_left_behind(server):
    yield
    assert server.becomes(lambda: server.request("GET", "/health").status == 200)
    assert server.complete("still here").text() == "still here"
    assert server.becomes(server.is_idle)


@pytest.fixture(scope="module")
def client(server):
    base_url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def ask(server, said, **fields):
    return server.post(PATH, {"input": said, "temperature": 0} | fields)


def events(reply):
    """The events of a stream, whose names and numbers are checked."""
    blocks = reply.body.decode().split("\n\n")
    assert blocks.pop() == ""
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert event["sequence_number"] == number
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def texts(response):
    return [part["text"] for item in response["output"] for part in item.get("content", ())]


def without_ids(response):
    names = ("id", "call_id", "created_at")
    output = [{k: v for k, v in item.items() if k not in names} for item in response["output"]]
    return {k: v for k, v in response.items() if k not in names} | {"output": output}


# What comes back


def test_a_text_is_answered(server):
    response = ask(server, "hello", metadata={"a": "b"}).json
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert texts(response) == ["hello>"]
    assert (response["object"], response["status"]) == ("response", "completed")
    assert response["metadata"] == {"a": "b"}
    assert response["usage"] == {
        "input_tokens": 6,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }


def test_too_few_tokens_leave_it_incomplete(server):
    response = ask(server, "hello", max_output_tokens=3).json
    assert (response["status"], texts(response)) == ("incomplete", ["hel"])
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_a_stream_announces_what_it_brings_and_ends_with_all_of_it(server):
    reply = ask(server, [{"role": "user", "content": "hello"}], stream=True)
    found = events(reply)
    kinds = [event["type"].removeprefix("response.") for event in found]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event["delta"] for event in found if "delta" in event) == "hello>"
    last = found[-1]["response"]
    assert without_ids(last) == without_ids(ask(server, "hello").json)
    assert found[0]["response"]["status"] == "in_progress"
    item = last["output"][0]
    assert [e["item_id"] for e in found if "item_id" in e] == [item["id"]] * (deltas + 3)
    assert next(e for e in found if e["type"].endswith("item.done"))["item"] == item


def test_thoughts_and_calls_are_items_of_their_own(tools):
    script = f"<think>hm</think>Wait.\n{CALL}"
    whole = ask(tools, script, tools=[TOOL]).json
    thought, said, call = whole["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "hm")
    assert (said["type"], said["content"][0]["text"]) == ("message", "Wait.")
    assert (call["type"], call["name"], call["arguments"]) == (
        "function_call",
        "get_weather",
        ARGUMENTS,
    )
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    found = events(ask(tools, script, tools=[TOOL], stream=True))
    assert without_ids(found[-1]["response"]) == without_ids(whole)
    pieces = [e for e in found if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(e["delta"] for e in pieces) == ARGUMENTS
    assert {e["output_index"] for e in pieces} == {2}
    done = next(e for e in found if e["type"] == "response.function_call_arguments.done")
    assert done["arguments"] == ARGUMENTS


def test_a_stream_that_breaks_off_says_so(server):
    text = "a" + chr(0x100)
    reply = server.post(PATH, {"input": text, "temperature": 0, "stream": True})
    assert events(reply)[-1]["type"] == "response.completed"
    body = [{"role": "user", "content": "ab"}]
    original = server.service.tokenizer.encode_chat
    server.service.tokenizer.encode_chat = lambda *_, **__: [*b"ab", SLOW, DIE]
    try:
        failed = events(server.post(PATH, {"input": body, "temperature": 0, "stream": True}))[-1]
        whole = ask(server, body)
    finally:
        server.service.tokenizer.encode_chat = original
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"]
    assert server.request("GET", f"{PATH}/{failed['response']['id']}").status == 404
    assert whole.status in (500, 503)


def test_a_schema_of_the_text_reaches_the_engine(server, monkeypatch):
    seen = []
    submit = server.service.client.submit
    monkeypatch.setattr(
        server.service.client,
        "submit",
        lambda requests, **rest: seen.extend(requests) or submit(requests, **rest),
    )
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    response = ask(server, "a", text={"format": form}).json
    assert response["text"] == {"format": form}
    chat = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    server.chat("a", response_format=chat)
    assert seen[0].sampling.constraint == seen[1].sampling.constraint is not None


# What came before


def test_a_conversation_goes_on_where_it_was(server):
    first = ask(server, "one", instructions="be brief ").json
    second = ask(server, "two", previous_response_id=first["id"]).json
    assert texts(first) == ["be brief one>"]
    assert texts(second) == ["one" + "be brief one>" + "two>"]  # without the instructions
    third = ask(server, "3", previous_response_id=second["id"], instructions="now ").json
    assert third["usage"]["input_tokens"] == len("now one" + "be brief one>" + "two" + "3>") + len(
        texts(second)[0]
    )
    assert third["previous_response_id"] == second["id"]


def test_items_of_an_output_can_be_sent_back(tools):
    first = ask(tools, f"<think>hm</think>Wait.{CALL}", tools=[TOOL]).json
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    by_id = ask(tools, [result], tools=[TOOL], previous_response_id=first["id"]).json
    question = {"role": "user", "content": f"<think>hm</think>Wait.{CALL}"}
    by_hand = ask(tools, [question, *first["output"], result], tools=[TOOL]).json
    assert texts(by_id) == texts(by_hand) == ["rain"]
    assert by_id["usage"]["input_tokens"] == by_hand["usage"]["input_tokens"]


def test_a_response_is_fetched_and_deleted(server):
    response = ask(server, "hello").json
    path = f"{PATH}/{response['id']}"
    assert server.request("GET", path).json == response
    assert "background" in refusal(server.post(f"{path}/cancel", b""), "response_id")
    assert server.request("DELETE", path).json["deleted"] is True
    for reply in (
        server.request("GET", path),
        server.request("DELETE", path),
        server.post(f"{path}/cancel", b""),
        ask(server, "a", previous_response_id=response["id"]),
    ):
        assert reply.status == 404
    assert reply.error["param"] == "previous_response_id"


def test_what_is_not_to_be_stored_is_not(server):
    response = ask(server, "hello", store=False).json
    assert response["store"] is False
    assert server.request("GET", f"{PATH}/{response['id']}").status == 404


def test_the_oldest_make_room(server, monkeypatch):
    first, second = (ask(server, "hello").json["id"] for _ in range(2))
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 2)
    ask(server, "hello")
    assert server.request("GET", f"{PATH}/{first}").status == 404
    assert server.request("GET", f"{PATH}/{second}").status == 200
    monkeypatch.setattr(response_store, "MAX_BYTES", 100)
    last = ask(server, "hello").json["id"]
    for name in (second, last):
        assert server.request("GET", f"{PATH}/{name}").status == 404


def test_what_is_kept_of_a_conversation_counts_once_and_as_long_as_anyone_has_it(monkeypatch):
    store = ResponseStore()

    def add(name, *turns):
        store.add(StoredResponse(SimpleNamespace(id=name), turns, "ann"))

    first, second, third = (Turn((name,), size) for name, size in (("a", 100), ("b", 20), ("c", 3)))
    add("first", first)
    add("second", first, second)
    add("third", first, third)
    assert store.get("third", "ann").messages == ("a", "c")
    assert store.size == 123
    store.delete("first", "ann")
    assert store.size == 123
    store.delete("second", "ann")
    assert store.size == 103
    monkeypatch.setattr(response_store, "MAX_BYTES", 102)
    add("fourth", second)  # a small follow-up does not keep a large beginning for nothing
    assert store.size == 20
    with pytest.raises(NotFound):
        store.get("third", "ann")
    store.delete("fourth", "ann")
    assert store.size == 0


def test_responses_are_their_key_s_own(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: a-key\nbob: b-key\n")
    ann, bob = ({"Authorization": f"Bearer {key}"} for key in ("a-key", "b-key"))
    with running_server(keys=Keys(file)) as server:
        name = server.post(PATH, {"input": "hello", "temperature": 0}, **ann).json["id"]
        assert server.request("GET", f"{PATH}/{name}", headers=ann).status == 200
        assert server.request("GET", f"{PATH}/{name}", headers=bob).status == 404
        assert server.request("DELETE", f"{PATH}/{name}", headers=bob).status == 404
        ask_bob = {"input": "a", "previous_response_id": name}
        assert server.post(PATH, ask_bob, **bob).status == 404


# What is refused


def test_a_fault_in_the_format_is_told_in_this_api_s_words(server):
    form = {"type": "json_schema", "name": "n"}
    words = refusal(ask(server, "a", text={"format": form}), "text")
    assert "text.format" in words and "response_format" not in words


@pytest.mark.parametrize(
    "change, param",
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "alien", "content": "a"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "a"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input"),
        ({"input": "a" * 100}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1000}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"reasoning": {"summary": "auto"}}, "reasoning"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"service_tier": "best"}, "service_tier"),
        ({"conversation": "x"}, "conversation"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
    ],
)
def test_what_cannot_be_had_is_refused(server, change, param):
    refusal(server.post(PATH, {"input": "a"} | change), param)


def test_what_asks_for_nothing_is_taken(server):
    nothing = {
        "background": False,
        "truncation": "disabled",
        "include": [],
        "text": {"format": {"type": "text"}},
        "tools": [],
        "tool_choice": "auto",
        "reasoning": {"effort": None},
        "parallel_tool_calls": True,
        "instructions": None,
        "stream_options": None,
    }
    assert texts(ask(server, "hello", **nothing).json) == ["hello>"]


# The client library


def test_the_openai_library_s_own_way(client):
    response = client.responses.create(model=MODEL_NAME, input="hello", temperature=0)
    assert response.output_text == "hello>"
    assert client.responses.retrieve(response.id).output_text == "hello>"
    more = client.responses.create(
        model=MODEL_NAME, input="more", temperature=0, previous_response_id=response.id
    )
    assert more.output_text == "hellohello>more>"
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_the_openai_library_s_streams(client):
    with client.responses.stream(model=MODEL_NAME, input="hello", temperature=0) as stream:
        pieces = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert "".join(pieces) == "hello>"
        assert stream.get_final_response().output_text == "hello>"
    events = list(client.responses.create(model=MODEL_NAME, input="hi", temperature=0, stream=True))
    assert events[-1].response.output_text == "hi>"


@pytest.mark.parametrize("streamed", [False, True])
def test_the_openai_library_asynchronously(server, streamed):
    async def main():
        base_url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            reply = await client.responses.create(
                model=MODEL_NAME, input="hello", temperature=0, stream=streamed
            )
            if not streamed:
                return reply.output_text
            return [event async for event in reply][-1].response.output_text

    assert asyncio.run(main()) == "hello>"


def test_the_openai_library_calls_functions(tools):
    base_url = f"http://127.0.0.1:{tools.port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        asked = {"model": MODEL_NAME, "temperature": 0, "tools": [TOOL]}
        response = client.responses.create(input=CALL, **asked)
        (call,) = response.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        again = client.responses.create(input=[*response.output, result], **asked)
        assert again.output_text == "rain"
