"""What every route takes and answers, as types. `openapi.py` makes a document of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from jaxserve.server.history import HistoryReply
from jaxserve.server.in_flight import Aborted, InFlightList
from jaxserve.server.openai import ChatBody, CompletionBody
from jaxserve.server.replies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Health,
    Model,
    ModelList,
    Version,
)
from jaxserve.server.tokenization import DetokenizeBody, Detokenized, TokenizeBody, Tokens

Type = type[msgspec.Struct]

READING = (400, 401, 404, 413)
GENERATING = (*READING, 429, 500, 503, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        summary: what it does, in a few words.
        answer: the body of a 200: JSON of this type, or the content type of something else.
        body: what is sent as JSON, if anything is.
        query: names of numbers that may be sent in the query.
        required: fields of the body that have to be there, although their type has a default.
        events: of each server-sent event, where `stream` can be true.
        errors: statuses to expect besides; all have the same form.
        unavailable: the body of a 503 that has another form.
    """

    summary: str
    answer: Type | str
    body: Type | None = None
    query: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    events: Type | None = None
    errors: tuple[int, ...] = ()
    unavailable: Type | None = None


OPERATIONS: Mapping[tuple[str, str], Operation] = MappingProxyType(
    {
        ("POST", "/v1/completions"): Operation(
            "Continue a text",
            Completion,
            body=CompletionBody,
            required=("prompt",),
            events=Completion,
            errors=GENERATING,
        ),
        ("POST", "/v1/chat/completions"): Operation(
            "Answer in a conversation",
            ChatCompletion,
            body=ChatBody,
            required=("messages",),
            events=ChatChunk,
            errors=GENERATING,
        ),
        ("POST", "/tokenize"): Operation(
            "The tokens of a text or a conversation",
            Tokens,
            body=TokenizeBody,
            errors=(*READING, 429),
        ),
        ("POST", "/detokenize"): Operation(
            "The text of tokens",
            Detokenized,
            body=DetokenizeBody,
            required=("tokens",),
            errors=(*READING, 429),
        ),
        ("GET", "/v1/models"): Operation("The models served", ModelList, errors=(401,)),
        ("GET", "/v1/models/{name}"): Operation("A model, by its name", Model, errors=(401, 404)),
        ("GET", "/health"): Operation(
            "Whether requests are welcome", Health, errors=(503,), unavailable=Health
        ),
        ("GET", "/metrics"): Operation("Numbers for Prometheus", "text/plain"),
        ("GET", "/version"): Operation("The version of the server", Version),
        ("GET", "/openapi.json"): Operation("This document", "application/json"),
        ("GET", "/docs"): Operation("This document as a page", "text/html"),
        ("GET", "/history"): Operation(
            "The last quarter of an hour, for charts",
            HistoryReply,
            query=("since",),
            errors=(400, 401),
        ),
        ("GET", "/requests"): Operation("What runs and what waits", InFlightList, errors=(401,)),
        ("POST", "/requests/{id}/abort"): Operation(
            "End a request: it is answered with what there is", Aborted, errors=(401, 404, 429)
        ),
        ("GET", "/"): Operation("The page for people", "text/html"),
        ("GET", "/page/{name}"): Operation("A file of that page", "*/*", errors=(404,)),
    }
)
"""(method, path) -> what happens there."""
