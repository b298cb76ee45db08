"""GET /openapi.json and /docs: the API, described from the types that requests are decoded into."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web
from jinja2 import Environment, select_autoescape

from jaxserve.server.auth import is_open
from jaxserve.server.operations import OPERATIONS, Operation, Type
from jaxserve.server.replies import ErrorReply, json_response

Schema = dict[str, Any]

SCHEMAS = "#/components/schemas/"
REASONS = {
    400: "The request cannot be served as it stands; `param` names the field at fault",
    401: "A key of this server is needed, where it was given some",
    404: "There is no such thing, or the model is another one",
    413: "The body is too large",
    429: "Not now: `Retry-After` says when to come again",
    500: "The server failed",
    503: "No requests are taken: starting, or shutting down",
    504: "The request's deadline has passed",
}
PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
DESCRIPTION = """\
A parameter is honoured or refused, never ignored; null is the same as absent. Fields of the \
OpenAI and vLLM APIs that are not listed are accepted where they ask for nothing.\
"""


async def show_openapi(http: web.Request) -> web.Response:
    """GET /openapi.json."""
    return json_response(document())


async def show_docs(http: web.Request) -> web.Response:
    """GET /docs: the same for people. One page that loads nothing else."""
    return web.Response(text=page(), content_type="text/html", headers=PAGE_HEADERS)


def package_version() -> str:
    """Of jaxserve; "unknown" in a checkout that was never installed."""
    try:
        return version("jaxserve")
    except PackageNotFoundError:
        return "unknown"


@cache
def document() -> Schema:
    """The document: OpenAPI 3.1, whose schemas are plain JSON Schema."""
    schemas = component_schemas()
    paths: dict[str, Schema] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = described(method, path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": package_version(), "description": DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # a key is asked for only where the server was given some
    }


def component_schemas() -> dict[str, Schema]:
    """Every type of every operation, by name."""
    types: dict[Type, None] = {ErrorReply: None}
    required: dict[str, tuple[str, ...]] = {}
    for operation in OPERATIONS.values():
        for kind in (operation.body, operation.form, operation.answer, operation.events):
            if isinstance(kind, type):
                types[kind] = None
        if operation.body is not None:
            required[operation.body.__name__] = operation.required
    _, schemas = msgspec.json.schema_components(
        types, schema_hook=anything, ref_template=SCHEMAS + "{name}"
    )
    for name, fields in required.items():
        for field in fields:
            require(schemas[name], field)
    return dict(schemas)


def require(schema: Schema, name: str) -> None:
    """Make a field one that has to be there, and is not null."""
    field = schema["properties"][name]
    del field["default"]
    field["anyOf"].remove({"type": "null"})
    schema["required"].append(name)


def anything(kind: type) -> Schema:
    """The schema of `object`, which msgspec has none for. It takes no empty one."""
    return {"description": "Any JSON value"}


def described(method: str, path: str, operation: Operation) -> Schema:
    """One operation, in OpenAPI's words."""
    words = re.findall(r"\w+", path)
    entry: Schema = {
        "summary": operation.summary,
        "operationId": "_".join([method.lower(), *words]).replace(".", "_"),
        "responses": responses(operation),
    }
    if is_open(path, metrics_need_key=True):
        entry["security"] = []
    names = re.findall(r"{(\w+)}", path)
    entry["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": TEXT} for name in names
    ]
    if operation.query is not None:
        (_, schemas) = msgspec.json.schema_components([operation.query])
        fields = schemas[operation.query.__name__]["properties"]
        entry["parameters"] += [
            {"name": name, "in": "query", "schema": schema} for name, schema in fields.items()
        ]
    for kind, content_type in (
        (operation.body, "application/json"),
        (operation.form, "multipart/form-data"),
    ):
        if kind is not None:
            content = {content_type: {"schema": reference(kind)}}
            entry["requestBody"] = {"required": True, "content": content}
    return entry


def responses(operation: Operation) -> Schema:
    """What may come back, by status. `default` stands for errors any route may have."""
    content: Schema
    if isinstance(operation.answer, str):
        content = {operation.answer: {"schema": {} if "json" in operation.answer else TEXT}}
    else:
        content = {"application/json": {"schema": reference(operation.answer)}}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": event(operation.events)}
    found: Schema = {"200": {"description": "OK", "content": content}}
    for status in operation.errors:
        kind = operation.unavailable if status == 503 else None
        found[str(status)] = failure(REASONS[status], kind or ErrorReply)
    return found | {"default": failure("Any other error", ErrorReply)}


def failure(description: str, kind: Type) -> Schema:
    """An answer that is no 200."""
    return {
        "description": description,
        "content": {"application/json": {"schema": reference(kind)}},
    }


TEXT: Schema = {"type": "string"}


def event(kind: Type) -> Schema:
    """One server-sent event, as OpenAPI has been describing streams since 3.2: by their items."""
    return {
        "type": "object",
        "description": f"Server-sent events whose data is a {kind.__name__}, then [DONE]",
        "properties": {"data": TEXT | {"contentSchema": reference(kind)}},
    }


def reference(kind: type) -> Schema:
    """A pointer to a type's schema."""
    return {"$ref": SCHEMAS + kind.__name__}


@cache
def page() -> str:
    """The document as HTML."""
    environment = Environment(autoescape=select_autoescape(default=True), trim_blocks=True)
    environment.filters["in_words"] = in_words
    template = environment.from_string((files("jaxserve.server") / "docs.html").read_text())
    return template.render(document())


def in_words(schema: Mapping[str, Any]) -> str:
    """A field's type as a person would write it: `string or array of integer`."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(SCHEMAS)
    if "enum" in schema:
        return " or ".join(msgspec.json.encode(value).decode() for value in schema["enum"])
    if "anyOf" in schema:
        kinds = (in_words(option) for option in schema["anyOf"] if option != {"type": "null"})
        return " or ".join(kinds)
    match schema.get("type"):
        case "array":
            return f"array of {in_words(schema.get('items', {}))}"
        case "object" if schema.get("additionalProperties"):
            return f"object of {in_words(schema['additionalProperties'])}"
        case None:
            return "anything"
        case kind:
            return str(kind)
