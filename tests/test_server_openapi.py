"""/openapi.json says what the server does: the routes it has, and the bodies they really answer."""

import re

import pytest
from jsonschema import Draft202012Validator
from toy_model import MODEL_NAME
from toy_server import running_server, sse_lines, strict_json
from toy_worker import ERROR, SLOW

from jaxserve.server.app import routes
from jaxserve.server.keys import Keys

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(batch_dir=tmp_path_factory.mktemp("batches")) as server:
        yield server


@pytest.fixture(scope="module")
def document(server):
    return server.request("GET", "/openapi.json").json


def validate(document, name, value):
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    Draft202012Validator(schema).validate(value)


def answer_of(document, method, path, status):
    responses = document["paths"][path][method.lower()]["responses"]
    content = responses.get(str(status), responses["default"])["content"]
    return content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]


def test_it_has_every_route_and_no_other(document):
    served = {(route.method, re.sub(r":[^{}]+}", "}", route.path)) for route in routes()}
    described = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    assert described == served


def test_its_schemas_are_schemas_and_its_pointers_point_at_something(document):
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    pointers = set(re.findall(r"'#/components/schemas/(\w+)'", str(document)))
    assert pointers <= schemas.keys()
    assert len(pointers) > 15


def test_every_operation_has_an_id_of_its_own(document):
    ids = [op["operationId"] for methods in document["paths"].values() for op in methods.values()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    "method, path, body",
    [
        ("POST", "/v1/completions", {"prompt": "abc"}),
        ("POST", "/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "n": 2}),
        ("POST", "/v1/completions", {"prompt": [ERROR]}),
        ("POST", "/v1/completions", {"prompt": "a", "model": "other"}),
        ("POST", "/v1/completions", {}),
        ("POST", "/v1/chat/completions", {"messages": HI}),
        ("POST", "/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 3}),
        ("POST", "/v1/chat/completions", {"messages": []}),
        ("POST", "/v1/embeddings", {"input": ["a", "b"]}),
        ("POST", "/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("POST", "/v1/responses", {"input": "a"}),
        ("POST", "/v1/responses", {"input": HI, "instructions": "b", "metadata": {"k": "v"}}),
        ("POST", "/v1/responses", {"input": "a", "previous_response_id": "resp_x"}),
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/tokenize", {"messages": HI, "return_token_strs": True}),
        ("POST", "/detokenize", {"tokens": [97]}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/{name}", MODEL_NAME),
        ("GET", "/v1/models/{name}", "other"),
        ("GET", "/health", None),
        ("GET", "/version", None),
        ("GET", "/history", None),
        ("GET", "/requests", None),
        ("POST", "/requests/{id}/abort", None),
    ],
)
def test_what_comes_back_is_what_it_says(server, document, method, path, body):
    if isinstance(body, dict):
        sent = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        reply = server.post(path, {"temperature": 0} | body if "/v1/" in path else body)
        if reply.status == 200:
            validate(document, sent["schema"]["$ref"].rsplit("/", 1)[1], body)
    else:
        reply = server.request(method, path.replace("{name}", body or ""))
    validate(document, answer_of(document, method, path, reply.status), reply.json)


def test_files_and_batches_are_what_it_says(server, document):
    head = "--b\r\nContent-Disposition: form-data; name="
    form = f'{head}"purpose"\r\n\r\nbatch\r\n{head}"file"\r\n\r\n{{}}\r\n--b--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    file = server.request("POST", "/v1/files", form.encode(), headers).json
    validate(document, "FileObject", file)
    ask = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    validate(document, "BatchBody", ask)
    batch = server.post("/v1/batches", ask).json
    path = f"/v1/batches/{batch['id']}"
    assert server.becomes(lambda: server.request("GET", path).json["status"] == "completed")
    for each in (batch, server.request("GET", path).json):
        validate(document, "Batch", each)
    validate(document, "FileList", server.request("GET", "/v1/files").json)
    validate(document, "BatchList", server.request("GET", "/v1/batches").json)
    path = f"/v1/files/{file['id']}"
    validate(document, "Deleted", server.request("DELETE", path).json)
    validate(document, "ErrorReply", server.request("GET", path).json)


def test_every_event_of_a_stream_is_what_it_says(server, document):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chat = server.chat("hi", logprobs=True, **options)
    text = server.complete("hi", logprobs=1, **options)
    for reply, kind in [(chat, "ChatChunk"), (text, "Completion")]:
        assert len(reply.events) >= 2
        for event in reply.events:
            validate(document, kind, event)
    ask = {"input": "hi", "temperature": 0, "stream": True}
    for block in server.post("/v1/responses", ask).body.decode().split("\n\n")[:-1]:
        validate(document, "ResponseEvent", strict_json(block.split("data: ")[1].encode()))
    broken = server.complete([97, SLOW, ERROR], stream=True)
    validate(document, "ErrorReply", strict_json(sse_lines(broken.body)[-1].encode()))


def test_health_says_why_not(server, document, monkeypatch):
    monkeypatch.setattr(server.service, "gave_up", "no luck")
    reply = server.request("GET", "/health")
    assert reply.status == 503
    validate(document, "Health", reply.json)


def test_the_page_shows_every_operation_and_type_and_loads_nothing(server, document):
    reply = server.request("GET", "/docs")
    assert reply.headers["Content-Type"].startswith("text/html")
    assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'")
    page = reply.body.decode()
    assert not re.findall(r"<script|<link|<img|src=|https?:", page)
    ids = set(re.findall(r'id="(\w+)"', page))
    operations = {op["operationId"] for p in document["paths"].values() for op in p.values()}
    assert ids == operations | document["components"]["schemas"].keys()
    assert set(re.findall(r'href="#(\w+)"', page)) <= ids
    assert "array of string or integer or array of integer" in page  # a prompt


def test_it_is_open_to_all_and_says_what_else_is():
    with running_server(keys=Keys(key="secret")) as server:
        document = server.request("GET", "/openapi.json").json
        for path, methods in document["paths"].items():
            if "get" in methods and "{" not in path:
                is_open = methods["get"].get("security") == []
                assert (server.request("GET", path).status == 200) == is_open or path == "/metrics"
