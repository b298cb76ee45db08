"""/v1/embeddings: vectors in the form asked for, and what has none is refused."""

import base64
import json
import math
from array import array

import openai
import pytest
from toy_model import MAX_CONTEXT, MODEL_NAME
from toy_server import refusal, running_server
from toy_worker import VOCAB_SIZE

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(batch_dir=tmp_path_factory.mktemp("batches")) as server:
        yield server


@pytest.fixture(autouse=True)
def a_normal_request_still_works_and_nothing_is_left_behind(server):
    yield
    assert server.complete("still here").text() == "still here"
    assert server.becomes(server.is_idle)


def raw(first):
    """What the toy worker's hidden states come to."""
    return [float(first), 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 12.0]


def unit(numbers):
    return pytest.approx([x / math.hypot(*numbers) for x in numbers], abs=1e-6)


def embed(server, given, **fields):
    reply = server.post(PATH, {"input": given} | fields)
    assert reply.status == 200, reply.body
    data = reply.json["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


def test_a_text_becomes_a_unit_vector(server):
    reply = server.post(PATH, {"input": "abc", "model": MODEL_NAME}).json
    assert reply["object"] == "list"
    assert reply["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert reply["data"][0]["embedding"] == unit(raw(ord("c")))


@pytest.mark.parametrize(
    "given, last",
    [
        (["ab", "b", "xyz"], [*b"bbz"]),
        ([5, 6, 7], [7]),
        ([[5], [6, 9], [1, 2, VOCAB_SIZE - 1]], [5, 9, VOCAB_SIZE - 1]),
        (["a" * MAX_CONTEXT], [*b"a"]),
    ],
)
def test_every_text_gets_a_vector_in_its_place(server, given, last):
    assert embed(server, given, normalize=False) == [raw(token) for token in last]


def test_pooling_is_the_request_s_or_the_server_s(server):
    assert embed(server, [3, 4], pooling="mean", normalize=False) == [raw(3.5)]
    with running_server(pooling="mean") as other:
        assert embed(other, [3, 4], normalize=False) == [raw(3.5)]
        assert embed(other, [3, 4], pooling="last", normalize=False) == [raw(4)]


def test_fewer_dimensions_are_a_unit_again(server):
    (short,) = embed(server, [2], dimensions=3)
    assert short == unit(raw(2)[:3])
    assert embed(server, [2], dimensions=8) == embed(server, [2])


def test_base64_holds_the_same_numbers(server):
    (text,) = embed(server, "abc", encoding_format="base64")
    assert array("f", base64.b64decode(text)).tolist() == embed(server, "abc")[0]


@pytest.mark.parametrize(
    "change, param",
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [VOCAB_SIZE]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [[1], [2**32]]}, "input"),
        ({"input": "a" * (MAX_CONTEXT + 1)}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 9}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"service_tier": "best"}, "service_tier"),
        ({"timeout": 0}, "timeout"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_what_has_no_vector_is_refused(server, change, param):
    refusal(server.post(PATH, {"input": "a"} | change), param)


def test_more_texts_than_the_server_takes_are_refused():
    with running_server(max_pending=3) as server:
        assert "4 texts" in refusal(server.post(PATH, {"input": ["a"] * 4}), "input")
        assert len(embed(server, ["a"] * 3)) == 3


def test_another_model_and_a_server_without_a_worker(server, monkeypatch):
    assert server.post(PATH, {"input": "a", "model": "other"}).status == 404
    monkeypatch.setattr(server.service, "draining", True)
    assert server.post(PATH, {"input": "a"}).status == 503


def test_the_openai_library_s_own_way(server):
    base_url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        reply = client.embeddings.create(model=MODEL_NAME, input=["abc", "x"], dimensions=4)
        assert [item.embedding for item in reply.data] == embed(server, ["abc", "x"], dimensions=4)


def test_a_batch_of_them(server):
    head = "--b\r\nContent-Disposition: form-data; name="
    line = {"custom_id": "a", "method": "POST", "url": PATH, "body": {"input": "abc"}}
    form = f'{head}"purpose"\r\n\r\nbatch\r\n{head}"file"\r\n\r\n{json.dumps(line)}\r\n--b--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    file = server.request("POST", "/v1/files", form.encode(), headers).json["id"]
    ask = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"}
    path = f"/v1/batches/{server.post('/v1/batches', ask).json['id']}"
    assert server.becomes(lambda: server.request("GET", path).json["status"] == "completed")
    output = server.request("GET", path).json["output_file_id"]
    body = server.request("GET", f"/v1/files/{output}/content").json["response"]["body"]
    assert body["data"][0]["embedding"] == embed(server, "abc")[0]
