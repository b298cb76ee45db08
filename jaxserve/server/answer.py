"""The two endpoints that generate: plan, submit, turn events into an answer, clean up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

from aiohttp import web

from jaxserve.errors import DeadlinePassed, EngineStopped, Overloaded, RequestError
from jaxserve.server.access_log import Generated, generated
from jaxserve.server.auth import CALLER
from jaxserve.server.binary import BinaryEncoder
from jaxserve.server.choice import Choice, Delta
from jaxserve.server.client import Inbox
from jaxserve.server.failures import INTERNAL_ERROR, detail, failure
from jaxserve.server.generation import Generation
from jaxserve.server.keys import Caller
from jaxserve.server.replies import CompletionDetails, ErrorDetail, PromptDetails, Usage, encode
from jaxserve.server.service import SERVICE, Service
from jaxserve.server.stream import ChunkEncoder
from jaxserve.server.whole import join, whole_answer
from jaxserve.token_stream import CONTENT_TYPE

logger = logging.getLogger("jaxserve.server")

STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy that buffers would defeat streaming
}


async def completions(http: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await generate(http, chat=False)


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await generate(http, chat=True)


async def generate(http: web.Request, *, chat: bool) -> web.StreamResponse:
    """Answer one request.

    A client that hangs up cancels this handler; leaving it for any reason aborts what still runs.
    """
    arrived = perf_counter()
    service = http.app[SERVICE]
    refusal = service.turn_away(1)
    if refusal is not None:
        return refusal
    body = await read_json(http)
    refusal = service.turn_away(1)  # again: a body may take its time
    if refusal is not None:
        return refusal
    with service.handling():
        caller = http[CALLER]
        generation = await service.prepare(body, chat=chat, caller=caller)
        logger.debug("%s asked for by user %r", generation.answer_id, generation.user)
        refusal = service.turn_away(len(generation.requests))
        if refusal is not None:
            return refusal
        with answering(http.app, generation, caller, arrived=arrived) as answer:
            http[ANSWER] = answer
            if generation.stream:
                return await stream(http, answer, encoder_for(http, answer))
            return await whole(answer)


async def answer_unstreamed(
    app: web.Application, body: bytes, caller: Caller, *, chat: bool
) -> web.Response:
    """Answer a request that has no connection of its own. Raises what `prepare` and `answering`
    do."""
    service = app[SERVICE]
    refusal = service.turn_away(1)
    if refusal is not None:
        return refusal
    generation = await service.prepare(body, chat=chat, caller=caller)
    refusal = service.turn_away(len(generation.requests))
    if refusal is not None:
        return refusal
    with answering(app, generation, caller, arrived=perf_counter()) as answer:
        return await whole(answer)


@contextmanager
def answering(
    app: web.Application, generation: Generation, caller: Caller, *, arrived: float
) -> Iterator[Answer]:
    """Start what is to be generated, and leave nothing of it behind.

    `arrived` is when it was asked for, in seconds of `perf_counter`.

    Raises:
        RateLimited: the caller's key has no tokens left for it.
        EngineStopped: there is no worker that is ready.
    """
    service = app[SERVICE]
    service.rates.admit(caller.name, "tokens", sum(len(p.ids) for p in generation.prompts))
    inbox = service.client.submit(generation.requests, arrived=arrived)
    answer = Answer(service, generation, inbox, caller)
    app[IN_FLIGHT][generation.answer_id] = answer
    try:
        yield answer
    finally:
        del app[IN_FLIGHT][generation.answer_id]
        service.client.close(inbox)
        service.charge(caller, answer.usage())


async def read_json(http: web.Request) -> bytes:
    """The body. RequestError if it cannot be read or says it is something other than JSON."""
    if "Content-Type" in http.headers and http.content_type != "application/json":
        raise RequestError(f"the Content-Type is {http.content_type[:80]!r}: send application/json")
    try:
        return await http.read()
    except web.RequestPayloadError as error:
        raise RequestError(f"the request body cannot be read: {error}") from error


class Answer:
    """One answer in the making.

    Attributes:
        generation: what was asked.
        choices: one per sequence, in order of index.
        inbox: where their tokens come.
        caller: who asked.
    """

    def __init__(
        self, service: Service, generation: Generation, inbox: Inbox, caller: Caller
    ) -> None:
        self.service = service
        self.generation = generation
        self.caller = caller
        self.created = int(time.time())
        self.choices = [
            Choice(generation, index, service.tokenizer)
            for index in range(len(generation.requests))
        ]
        self.inbox = inbox
        self._index = {
            request.request_id: index for index, request in enumerate(generation.requests)
        }

    async def deltas(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """What becomes certain, batch by batch, as (index of the choice, delta).

        A batch may be empty: tokens came, and no text is certain yet.

        Raises:
            EngineStopped: the rest of the answer will not come.
            RequestError: there is no answer to what was asked.
        """
        unfinished = len(self.choices)
        while unfinished:
            touched: dict[int, None] = {}
            for event in await self.inbox.take():
                index = self._index[event.request_id]
                touched[index] = None
                if self.choices[index].push(event):
                    self.service.client.abort(self.inbox, (event.request_id,))
            taken = [(index, self.choices[index].take()) for index in touched]
            batch = [(index, delta) for index, delta in taken if delta is not None]
            unfinished -= sum(delta.finish_reason is not None for _, delta in batch)
            yield batch

    def usage(self) -> Usage:
        """The count of tokens."""
        num_prompt = sum(len(prompt.ids) for prompt in self.generation.prompts)
        num_output = sum(choice.num_tokens for choice in self.choices)
        first_choices = self.choices[:: self.generation.choices_per_prompt]
        cached = PromptDetails(sum(choice.num_cached for choice in first_choices))
        total = num_prompt + num_output
        if not self.generation.chat:
            return Usage(num_prompt, num_output, total, cached)
        thoughts = CompletionDetails(sum(choice.num_reasoning for choice in self.choices))
        return Usage(num_prompt, num_output, total, cached, thoughts)

    def summary(self) -> Generated:
        """What became of it so far, for the log."""
        return generated(self.generation, self.choices, self.inbox.timelines)


ANSWER = web.RequestKey("answer", Answer)
"""What is being made of a request, for the log."""
IN_FLIGHT = web.AppKey("in_flight", dict[str, Answer])
"""Every answer in the making by its id, oldest first."""


async def whole(answer: Answer) -> web.Response:
    """The answer in one piece, or 500 if the engine gave up."""
    pieces: list[list[Delta]] = [[] for _ in answer.choices]
    try:
        async for batch in answer.deltas():
            for index, delta in batch:
                pieces[index].append(delta)
    except EngineStopped as error:
        return failure(500, str(error))
    reply = whole_answer(
        answer.generation,
        [join(deltas) for deltas in pieces],
        answer.usage(),
        answer.service.tokenizer,
        model=answer.service.model_name,
        created=answer.created,
    )
    return web.Response(body=encode(reply), content_type="application/json")


class StreamWriter(Protocol):
    """Turns an answer into server-sent events, or into frames.

    Attributes:
        content_type: of what it writes.
    """

    content_type: str

    def begin(self) -> bytes:
        """What comes before the first piece."""

    def delta(self, index: int, delta: Delta) -> bytes:
        """A choice's next piece."""

    def end(self, usage: Usage) -> bytes:
        """What comes after the last piece."""

    def broken(self, error: ErrorDetail) -> bytes:
        """How the stream says that it breaks off."""


async def stream(http: web.Request, answer: Answer, writer: StreamWriter) -> web.StreamResponse:
    """The answer as events or frames, one write per batch.

    The headers wait for the first token, so a failure before it is a plain HTTP error. A later one
    becomes an error event, after which the connection closes.
    """
    service = answer.service
    response = web.StreamResponse(headers=STREAM_HEADERS | {"Content-Type": writer.content_type})
    try:
        try:
            end = await write_chunks(http, response, answer, writer)
        except (ConnectionError, TimeoutError):
            raise
        except EngineStopped as error:
            if not response.prepared:
                return failure(500, str(error))
            end = break_off(http, writer, str(error))
        except (Overloaded, DeadlinePassed) as error:
            if not response.prepared:
                raise
            end = break_off(http, writer, str(error), status=504)
        except RequestError as error:
            if not response.prepared:
                raise
            end = break_off(http, writer, str(error), status=400, param=error.param)
        except Exception:
            if not response.prepared:
                raise
            logger.exception("%s broke off", answer.generation.answer_id)
            end = break_off(http, writer, INTERNAL_ERROR)
        async with asyncio.timeout(service.write_timeout):
            await response.write_eof(end)
    except TimeoutError:
        logger.warning("a client read nothing for %g s and was dropped", service.write_timeout)
        service.client.metrics.broken_streams.inc()
        if http.transport is not None:
            http.transport.abort()
    except ConnectionError:
        pass  # the client has left
    return response


async def write_chunks(
    http: web.Request, response: web.StreamResponse, answer: Answer, writer: StreamWriter
) -> bytes:
    """Send everything but the end of a stream, and return that."""
    begin = writer.begin()
    async for batch in answer.deltas():
        if not response.prepared:
            await response.prepare(http)
        if batch:
            chunk = begin + b"".join([writer.delta(index, delta) for index, delta in batch])
            begin = b""
            async with asyncio.timeout(answer.service.write_timeout):
                await response.write(chunk)
    return writer.end(answer.usage())


def encoder_for(http: web.Request, answer: Answer) -> StreamWriter:
    """What writes a completion or a chat, in the form the client accepts."""
    service = answer.service
    accepted = http.headers.get("Accept", "").split(",")
    if CONTENT_TYPE in (kind.partition(";")[0].strip() for kind in accepted):
        return BinaryEncoder(answer.generation, model=service.model_name, created=answer.created)
    return ChunkEncoder(
        answer.generation,
        service.tokenizer,
        model=service.model_name,
        created=answer.created,
        usage_so_far=answer.usage if answer.generation.usage_in_chunks else None,
    )


def break_off(
    http: web.Request,
    writer: StreamWriter,
    message: str,
    *,
    status: int = 500,
    param: str | None = None,
) -> bytes:
    """The end of a stream that failed. The connection closes after it."""
    http.app[SERVICE].client.metrics.broken_streams.inc()
    http.protocol.close()
    return writer.broken(detail(status, message, param=param))
