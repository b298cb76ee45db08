"""What every route takes and answers, as types. `openapi.py` makes a document of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from jaxserve.server.batch_store import Batch
from jaxserve.server.batches import BatchBody
from jaxserve.server.embeddings import EmbeddingBody, EmbeddingList
from jaxserve.server.file_store import FileObject
from jaxserve.server.files import Deleted, FileForm
from jaxserve.server.history import HistoryQuery, HistoryReply
from jaxserve.server.in_flight import Aborted, InFlightList
from jaxserve.server.listing import BatchList, BatchQuery, FileList, FileQuery
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
from jaxserve.server.response_body import ResponseBody
from jaxserve.server.response_items import DeletedResponse, Response, ResponseEvent
from jaxserve.server.tokenization import DetokenizeBody, Detokenized, TokenizeBody, Tokens

Type = type[msgspec.Struct]

READING = (400, 401, 404, 413)
STORED = (400, 401, 404, 503)
GENERATING = (*READING, 429, 500, 503, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        summary: what it does, in a few words.
        answer: the body of a 200: JSON of this type, or the content type of something else.
        body: what is sent as JSON, if anything is.
        required: fields of the body that have to be there, although their type has a default.
        form: what is sent as a form instead. query: what may follow the "?".
        events: of each server-sent event, where `stream` can be true.
        errors: statuses to expect besides; all have the same form.
        unavailable: the body of a 503 that has another form.
    """

    summary: str
    answer: Type | str
    body: Type | None = None
    required: tuple[str, ...] = ()
    form: Type | None = None
    query: Type | None = None
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
        ("POST", "/v1/embeddings"): Operation(
            "Texts as vectors",
            EmbeddingList,
            body=EmbeddingBody,
            required=("input",),
            errors=GENERATING,
        ),
        ("POST", "/v1/responses"): Operation(
            "Answer in a conversation that the server remembers",
            Response,
            body=ResponseBody,
            required=("input",),
            events=ResponseEvent,
            errors=GENERATING,
        ),
        ("GET", "/v1/responses/{response_id}"): Operation(
            "A response that was stored", Response, errors=(401, 404)
        ),
        ("DELETE", "/v1/responses/{response_id}"): Operation(
            "Forget a response", DeletedResponse, errors=(401, 404)
        ),
        ("POST", "/v1/responses/{response_id}/cancel"): Operation(
            "Refused: no response runs in the background", Response, errors=(400, 401, 404)
        ),
        ("POST", "/v1/files"): Operation(
            "Upload a file for a batch", FileObject, form=FileForm, errors=STORED
        ),
        ("GET", "/v1/files"): Operation("The files here", FileList, query=FileQuery, errors=STORED),
        ("GET", "/v1/files/{file_id}"): Operation("A file", FileObject, errors=STORED),
        ("GET", "/v1/files/{file_id}/content"): Operation(
            "What is in a file", "application/jsonl", errors=STORED
        ),
        ("DELETE", "/v1/files/{file_id}"): Operation("Delete a file", Deleted, errors=STORED),
        ("POST", "/v1/batches"): Operation(
            "Have the requests in a file answered when there is time",
            Batch,
            body=BatchBody,
            required=("input_file_id", "endpoint", "completion_window"),
            errors=(*STORED, 413, 429),
        ),
        ("GET", "/v1/batches"): Operation(
            "The batches here", BatchList, query=BatchQuery, errors=STORED
        ),
        ("GET", "/v1/batches/{batch_id}"): Operation("A batch", Batch, errors=STORED),
        ("POST", "/v1/batches/{batch_id}/cancel"): Operation(
            "Give up what of a batch is not answered", Batch, errors=STORED
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
            query=HistoryQuery,
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
