"""A response as it comes: pieces of the answer in, items and the events that announce them out."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from jaxserve.parsers.parsed import CallDelta
from jaxserve.server.calls import new_call_id
from jaxserve.server.choice import Delta
from jaxserve.server.replies import AnswerEnd, ErrorDetail, Usage, encode
from jaxserve.server.response_items import (
    FunctionCall,
    IncompleteDetails,
    Item,
    ItemStatus,
    OutputMessage,
    OutputText,
    Reasoning,
    ReasoningText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseStatus,
    response_usage,
)
from jaxserve.server.stream import EVENTS

ENDINGS: Mapping[AnswerEnd | None, ResponseStatus] = MappingProxyType(
    {"length": "incomplete", "abort": "cancelled"}
)
"""Why generating ended -> the response's status. Else it is complete."""


class ResponseWriter:
    """Builds one response.

    At most one item is open at a time; what belongs to another one closes it.

    Attributes:
        response: as far as it is.
    """

    content_type = EVENTS

    def __init__(self, response: Response, *, short_ids: bool) -> None:
        """`short_ids`: see `ToolFormat`."""
        self.response = response
        self._short_ids = short_ids
        self._items: list[Item] = []
        self._open: Item | None = None
        self._call_index = -1
        self._pieces: list[str] = []
        self._number = 0
        self._finish: AnswerEnd | None = None

    def begin(self) -> bytes:
        """The events before the first token."""
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        """The events for the answer's next piece. There is one choice, so `index` is 0."""
        events = b""
        if delta.reasoning:
            events += self._reasoning(delta.reasoning)
        if delta.text:
            events += self._text(delta.text)
        for piece in delta.calls:
            events += self._call(piece)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
        return events

    def end(self, usage: Usage) -> bytes:
        """The last events."""
        status = ENDINGS.get(self._finish, "completed")
        events = self._close("completed" if status == "completed" else "incomplete")
        if not self._items:  # nothing but an end token: an empty message, as chats have it
            events += self._start_text() + self._close("completed")
        details = IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        self.response = replace(
            self.response,
            status=status,
            output=tuple(self._items),
            usage=response_usage(usage),
            incomplete_details=details,
        )
        kind = "response.completed" if status == "completed" else "response.incomplete"
        return events + self._event(kind, response=self.response)

    def broken(self, error: ErrorDetail) -> bytes:
        """The last event of a response that will not get to its end."""
        self.response = replace(
            self.response,
            status="failed",
            output=tuple(self._items),
            error=ResponseError(error.code or "server_error", error.message),
        )
        return self._event("response.failed", response=self.response)

    def _text(self, text: str) -> bytes:
        events = b"" if isinstance(self._open, OutputMessage) else self._start_text()
        self._pieces.append(text)
        return events + self._part_event("response.output_text.delta", delta=text, logprobs=())

    def _start_text(self) -> bytes:
        name = f"msg_{secrets.token_hex(12)}"
        events = self._start(OutputMessage(name, "in_progress"))
        return events + self._part_event("response.content_part.added", part=OutputText(""))

    def _reasoning(self, text: str) -> bytes:
        events = b""
        if not isinstance(self._open, Reasoning):
            events = self._start(Reasoning(f"rs_{secrets.token_hex(12)}", "in_progress"))
            events += self._part_event("response.content_part.added", part=ReasoningText(""))
        self._pieces.append(text)
        return events + self._part_event("response.reasoning_text.delta", delta=text)

    def _call(self, piece: CallDelta) -> bytes:
        events = b""
        if piece.name is not None:
            call_id = new_call_id(short=self._short_ids)
            name = f"fc_{secrets.token_hex(12)}"
            events = self._start(FunctionCall(name, call_id, piece.name, "", "in_progress"))
            self._call_index = piece.index
        if piece.arguments:
            self._pieces.append(piece.arguments)
            events += self._item_event(
                "response.function_call_arguments.delta", delta=piece.arguments
            )
        return events

    def _start(self, item: Item) -> bytes:
        events = self._close("completed")
        self._open = item
        return events + self._event(
            "response.output_item.added", output_index=len(self._items), item=item
        )

    def _close(self, status: ItemStatus) -> bytes:
        """End the item that is open, if one is."""
        text = "".join(self._pieces)
        item: Item
        match self._open:
            case None:
                return b""
            case OutputMessage():
                part = OutputText(text)
                events = self._part_event("response.output_text.done", text=text, logprobs=())
                events += self._part_event("response.content_part.done", part=part)
                item = replace(self._open, status=status, content=(part,))
            case Reasoning():
                thought = ReasoningText(text)
                events = self._part_event("response.reasoning_text.done", text=text)
                events += self._part_event("response.content_part.done", part=thought)
                item = replace(self._open, status=status, content=(thought,))
            case FunctionCall():
                events = self._item_event(
                    "response.function_call_arguments.done", arguments=text, name=self._open.name
                )
                item = replace(self._open, status=status, arguments=text)
        events += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open, self._pieces = None, []
        return events

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        place = {"output_index": len(self._items), "item_id": self._open.id}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = ResponseEvent(kind, self._number, **fields)
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(event))
