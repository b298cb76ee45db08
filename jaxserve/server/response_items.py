"""Answers of /v1/responses: a response, the items of its output, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.server.replies import Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[str, ...] = ()
    logprobs: tuple[str, ...] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: ItemStatus
    content: tuple[OutputText, ...] = ()
    role: Literal["assistant"] = "assistant"


class Reasoning(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """What the model thought before."""

    id: str
    status: ItemStatus
    content: tuple[ReasoningText, ...] = ()
    summary: tuple[str, ...] = ()


class FunctionCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call the model wants made. `arguments` is JSON."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


Item = OutputMessage | Reasoning | FunctionCall


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class Response(msgspec.Struct, frozen=True):
    """A response, as it was asked for and as far as it is answered."""

    id: str
    created_at: int
    model: str
    status: ResponseStatus
    output: tuple[Item, ...] = ()
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, str | None] = {}
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: tuple[Any, ...] = ()
    top_p: float = 1.0
    usage: ResponseUsage | None = None
    user: str | None = None
    background: bool = False
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"


class ResponseEvent(msgspec.Struct, frozen=True):
    """One event of a stream. `type` says which of the other fields there are."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: tuple[str, ...] | UnsetType = UNSET


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["response"] = "response"


def response_usage(usage: Usage) -> ResponseUsage:
    """The count of tokens in this API's words."""
    thoughts = usage.completion_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputDetails(0 if thoughts is UNSET else thoughts.reasoning_tokens),
        usage.total_tokens,
    )
