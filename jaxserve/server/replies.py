"""Response bodies of the OpenAI API. UNSET fields are left out, None is written as null."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from jaxserve.request import FinishReason

AnswerEnd = FinishReason | Literal["tool_calls"]
"""Why an answer ended, as clients are told."""


class PromptDetails(msgspec.Struct, frozen=True):
    """Of the prompt tokens: how many were found in the cache, not computed."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Of the output's tokens: how many were thoughts, the marks around them included."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens: every prompt counts once, every choice's output counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


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


class PromptToken(msgspec.Struct, frozen=True):
    """A token in its place of a prompt. `rank` is 1 for the likeliest one there, null for one
    beyond the likeliest that are known."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""For each token of a prompt, ids of it and of those likelier there; null for the first."""


class CompletionChoice(msgspec.Struct, frozen=True):
    """Also the choice of a chunk: the two look the same. Ids come if they are asked for; those of
    the prompt with the first chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: AnswerEnd | None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """An answer, or one chunk of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class CalledFunction(msgspec.Struct, frozen=True):
    """`arguments` is JSON as the model wrote it, which need not be valid."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """An answer. `reasoning` is another name of `reasoning_content`: clients look for either."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: AnswerEnd | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class FunctionDelta(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of a call. The first one of a call has its id, its type and the function's name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: AnswerEnd | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
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


def never_stored(reply: object) -> web.Response:
    """A reply that is old in a moment."""
    response = json_response(reply)
    response.headers["Cache-Control"] = "no-store"
    return response
