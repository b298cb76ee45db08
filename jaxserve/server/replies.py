"""Response bodies of the OpenAI API. UNSET fields are left out, None is written as null."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from jaxserve.request import FinishReason


class PromptDetails(msgspec.Struct, frozen=True):
    """Of the prompt tokens: how many were found in the cache, not computed."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens: every prompt counts once, every choice's output counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry per token in each list, in the older format.

    Attributes:
        top_logprobs: text of a token -> its log-probability; the chosen one is always there.
        text_offset: characters of the choice's text before each token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    """Also the choice of a chunk: the two look the same."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(msgspec.Struct, frozen=True):
    """An answer, or one chunk of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class ChatMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong.

    Attributes:
        message: for a person.
        type: who can mend it, in OpenAI's words.
        param: the field at fault, if one is.
        code: for a program, if there is one.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorDetail


class Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "jaxserve"


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Health(msgspec.Struct, frozen=True):
    """Attributes:
    status: "ok" while requests are welcome.
    reason: why they are not.
    """

    status: Literal["ok", "unavailable"]
    reason: str | UnsetType = UNSET


class Version(msgspec.Struct, frozen=True):
    version: str


encode = msgspec.json.Encoder().encode


def json_response(reply: object, status: int = 200) -> web.Response:
    """`reply` as JSON; msgspec Structs and plain dicts alike."""
    return web.Response(body=encode(reply), status=status, content_type="application/json")
