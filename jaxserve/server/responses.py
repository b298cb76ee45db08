"""/v1/responses: a chat in OpenAI's newer form, which the server can remember."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from aiohttp import web

from jaxserve.errors import EngineStopped, RequestError
from jaxserve.server.answer import ANSWER, Answer, answering, read_json, stream
from jaxserve.server.auth import CALLER
from jaxserve.server.failures import failure
from jaxserve.server.generation import Generation
from jaxserve.server.keys import Caller
from jaxserve.server.limits import Limits
from jaxserve.server.openai import Message, decode_body
from jaxserve.server.replies import encode, json_response
from jaxserve.server.response_body import (
    ResponseBody,
    TextConfig,
    TextFormat,
    chat_body,
    input_messages,
    output_messages,
)
from jaxserve.server.response_events import ResponseWriter
from jaxserve.server.response_items import DeletedResponse, Response
from jaxserve.server.response_store import ResponseStore, StoredResponse, Turn
from jaxserve.server.service import SERVICE, Service

RESPONSES = web.AppKey("responses", ResponseStore)
PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}
"""What a chat calls a field -> what this API calls it."""
WORDS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
}
"""The same in messages, the longest first."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, planned.

    Attributes:
        generation: what it takes.
        response: its answer, before there is any.
        before: the conversation that it continues.
        messages: what it adds, without instructions.
        num_bytes: of its body.
    """

    generation: Generation
    response: Response
    before: tuple[Turn, ...]
    messages: tuple[Message, ...]
    num_bytes: int


async def create_response(http: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    arrived = perf_counter()
    service = http.app[SERVICE]
    refusal = service.turn_away(1)
    if refusal is not None:
        return refusal
    raw = await read_json(http)
    with service.handling():
        return await respond(http.app, raw, http[CALLER], arrived, http)


async def response_unstreamed(app: web.Application, raw: bytes, caller: Caller) -> web.Response:
    """Answer a request that has no connection of its own."""
    reply = await respond(app, raw, caller, perf_counter(), None)
    assert isinstance(reply, web.Response)
    return reply


async def respond(
    app: web.Application, raw: bytes, caller: Caller, arrived: float, http: web.Request | None
) -> web.StreamResponse:
    """Plan, generate, remember. `http`: the connection to stream to, if there is one."""
    service, store = app[SERVICE], app[RESPONSES]
    refusal = service.turn_away(1)
    if refusal is not None:
        return refusal
    loop = asyncio.get_running_loop()
    plan = partial(plan_response, service, store, raw, caller, service.limits())
    ask = await loop.run_in_executor(service.pool, plan)
    refusal = service.turn_away(1)
    if refusal is not None:
        return refusal
    writer = ResponseWriter(ask.response, short_ids=ask.generation.reading.short_ids)
    with answering(app, ask.generation, caller, arrived=arrived) as answer:
        if http is not None:
            http[ANSWER] = answer
        if http is not None and ask.generation.stream:
            reply = await stream(http, answer, writer)
        else:
            reply = await whole_response(answer, writer)
    if ask.response.store and writer.response.usage is not None:
        messages = (*ask.messages, *output_messages(writer.response.output))
        turn = Turn(messages, ask.num_bytes + len(encode(writer.response)))
        store.add(StoredResponse(writer.response, (*ask.before, turn), caller.owner))
    return reply


def plan_response(
    service: Service, store: ResponseStore, raw: bytes, caller: Caller, limits: Limits
) -> Ask:
    """Raises RequestError, with this API's names of fields."""
    body = decode_body(raw, ResponseBody)
    service.check_model(body.model)
    before: tuple[Turn, ...] = ()
    messages: Sequence[Message] = ()
    if body.previous_response_id is not None:
        earlier = body.previous_response_id
        stored = store.get(earlier, caller.owner, param="previous_response_id")
        before, messages = stored.turns, stored.messages
    try:
        generation = service.plan_chat(chat_body(body, messages), caller, limits)
    except RequestError as error:
        param = PARAMS.get(error.param or "", error.param)
        words = str(error)
        for of_chat, ours in WORDS.items():
            words = words.replace(of_chat, ours)
        raise RequestError(words, param=param) from None
    response = asked(body, generation, service)
    return Ask(generation, response, before, tuple(input_messages(body)), len(raw))


def asked(body: ResponseBody, generation: Generation, service: Service) -> Response:
    """The response before it is answered: what was asked for, defaults filled in."""
    text = body.text or TextConfig()
    return Response(
        id=f"resp_{generation.answer_id.rpartition('-')[2]}",
        created_at=int(time.time()),
        model=service.model_name,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None if body.reasoning is None else body.reasoning.effort},
        service_tier=body.service_tier or "default",
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text={"format": text.format or TextFormat("text")},
        tool_choice=body.tool_choice or "auto",
        tools=tuple(body.tools or ()),
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
    )


async def whole_response(answer: Answer, writer: ResponseWriter) -> web.Response:
    """The response in one piece, or 500 if the engine gave up."""
    try:
        async for batch in answer.deltas():
            for index, delta in batch:
                writer.delta(index, delta)
    except EngineStopped as error:
        return failure(500, str(error))
    writer.end(answer.usage())
    return json_response(writer.response)


async def show_response(http: web.Request) -> web.Response:
    """GET /v1/responses/ID."""
    stored = http.app[RESPONSES].get(http.match_info["response_id"], http[CALLER].owner)
    return json_response(stored.response)


async def delete_response(http: web.Request) -> web.Response:
    """DELETE /v1/responses/ID."""
    response_id = http.match_info["response_id"]
    http.app[RESPONSES].delete(response_id, http[CALLER].owner)
    return json_response(DeletedResponse(response_id))


async def cancel_response(http: web.Request) -> web.Response:
    """POST /v1/responses/ID/cancel: always refused, for none runs in the background."""
    http.app[RESPONSES].get(http.match_info["response_id"], http[CALLER].owner)
    raise RequestError(
        "only a response in the background can be cancelled, and this server has none: close the "
        "connection of the request instead",
        param="response_id",
    )


RESPONSE_ROUTES = (
    web.post("/v1/responses", create_response),
    web.get("/v1/responses/{response_id}", show_response),
    web.delete("/v1/responses/{response_id}", delete_response),
    web.post("/v1/responses/{response_id}/cancel", cancel_response),
)
