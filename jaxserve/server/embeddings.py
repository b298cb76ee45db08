"""/v1/embeddings: texts as vectors, made of the served model's final hidden states."""

from __future__ import annotations

import asyncio
import base64
import math
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Literal

import msgspec
from aiohttp import web

from jaxserve.errors import EngineStopped, RequestError
from jaxserve.request import Pooling, Request, SamplingParams
from jaxserve.server.answer import read_json
from jaxserve.server.auth import CALLER
from jaxserve.server.choice import what_happened
from jaxserve.server.client import Inbox
from jaxserve.server.failures import failure
from jaxserve.server.keys import Caller
from jaxserve.server.limits import Limits, within
from jaxserve.server.openai import CompletionBody, Int, decode_body
from jaxserve.server.prompts import completion_prompts
from jaxserve.server.replies import CompletionDetails, PromptDetails, Usage, json_response
from jaxserve.server.service import SERVICE, Service
from jaxserve.server.standing import deadline, service_class


class EmbeddingBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/embeddings. None stands for absent everywhere.

    Attributes:
        input: a text, texts, token ids or lists of them.
        encoding_format: "float", or "base64" of little-endian float32.
        dimensions: keep so many numbers at the front, and make the vector a unit again.
        pooling: of the hidden states, "last" or "mean"; else as the server was told.
        normalize: make vectors units; true unless said otherwise.
    """

    input: str | list[str | int | list[int]] | None = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    cache_salt: str | None = None
    service_tier: str | None = None
    priority: Int | None = None
    timeout: float | None = None
    user: str | None = None


class Embedding(msgspec.Struct, frozen=True):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class EmbeddingAsk:
    """A request, planned: what it asked for, and one sequence for each text."""

    body: EmbeddingBody
    requests: tuple[Request, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)


async def create_embeddings(http: web.Request) -> web.Response:
    """POST /v1/embeddings."""
    arrived = perf_counter()
    service = http.app[SERVICE]
    refusal = service.turn_away(1)
    if refusal is not None:
        return refusal
    raw = await read_json(http)
    with service.handling():
        return await embed(http.app, raw, http[CALLER], arrived=arrived)


async def embed(
    app: web.Application, raw: bytes, caller: Caller, *, arrived: float | None = None
) -> web.Response:
    """Answer a request, with a connection of its own or without.

    Raises:
        RequestError: it cannot be served.
        Overloaded, DeadlinePassed: not now, or not in time.
    """
    service = app[SERVICE]
    refusal = service.turn_away(1)
    if refusal is not None:
        return refusal
    loop = asyncio.get_running_loop()
    plan = partial(plan_embeddings, service, raw, caller, service.limits())
    ask = await loop.run_in_executor(service.pool, plan)
    refusal = service.turn_away(len(ask.requests))
    if refusal is not None:
        return refusal
    service.rates.admit(caller.name, "tokens", ask.num_tokens)
    arrived = perf_counter() if arrived is None else arrived
    inbox = service.client.submit(ask.requests, arrived=arrived)
    try:
        vectors = await pooled(inbox, ask.requests)
    except EngineStopped as error:
        return failure(500, str(error))
    finally:
        service.client.close(inbox)
    none = (PromptDetails(0), CompletionDetails(0))
    service.charge(caller, Usage(ask.num_tokens, 0, ask.num_tokens, *none))
    return json_response(await loop.run_in_executor(service.pool, reply, service, ask, vectors))


def plan_embeddings(service: Service, raw: bytes, caller: Caller, limits: Limits) -> EmbeddingAsk:
    """Raises RequestError, naming the field, for anything that cannot be served."""
    body = decode_body(raw, EmbeddingBody)
    service.check_model(body.model)
    within("dimensions", body.dimensions, 1, service.model.width, default=1)
    if body.input is None:
        raise RequestError("input is missing: a string, strings, or token ids", param="input")
    try:
        as_prompt = CompletionBody(prompt=body.input)
        prompts = completion_prompts(as_prompt, service.tokenizer, limits.vocab_size)
    except RequestError as error:
        message = str(error)
        if message.startswith("prompt"):
            message = "input" + message.removeprefix("prompt")
        raise RequestError(message, param="input") from None
    if len(prompts) > limits.max_sequences:
        raise RequestError(
            f"input has {len(prompts)} texts; this server takes at most {limits.max_sequences} in "
            "one request",
            param="input",
        )
    for i, prompt in enumerate(prompts):
        if len(prompt.ids) > limits.max_context:
            raise RequestError(
                f"input[{i}] has {len(prompt.ids)} tokens; this model's context holds "
                f"{limits.max_context}",
                param="input",
            )
    sampling = SamplingParams(0, pooling=body.pooling or service.config.pooling)
    name = f"embd-{secrets.token_hex(12)}"
    salt = f"{'' if limits.shared_cache else caller.name}/{body.cache_salt or ''}"
    requests = [
        Request(
            f"{name}-{i}",
            prompt.ids,
            sampling,
            cache_salt=salt,
            service_class=service_class(body),
            tenant=caller.tenant(body.user),
            deadline=deadline(body),
        )
        for i, prompt in enumerate(prompts)
    ]
    return EmbeddingAsk(body, tuple(requests))


async def pooled(inbox: Inbox, requests: Sequence[Request]) -> list[bytes]:
    """The pooled hidden states of each. Raises what became of those that have none."""
    found: dict[str, bytes] = {}
    while len(found) < len(requests):
        for event in await inbox.take():
            if not event.pooled:
                raise what_happened(event, "input")
            found[event.request_id] = event.pooled
    return [found[request.request_id] for request in requests]


def reply(service: Service, ask: EmbeddingAsk, vectors: Sequence[bytes]) -> EmbeddingList:
    """The answer's body."""
    body = ask.body
    data = [
        Embedding(i, written(shaped(vector, body.dimensions, body.normalize), body))
        for i, vector in enumerate(vectors)
    ]
    usage = EmbeddingUsage(ask.num_tokens, ask.num_tokens)
    return EmbeddingList(data, service.model_name, usage)


def shaped(vector: bytes, dimensions: int | None, normalize: bool | None) -> array[float]:
    """The front of the vector, as a unit unless that is not wanted. One of zeros stays so."""
    numbers = array("f", vector)[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in numbers))
    if normalize is False or length == 0:
        return numbers
    return array("f", (x / length for x in numbers))


def written(numbers: array[float], body: EmbeddingBody) -> list[float] | str:
    """The numbers in the form asked for."""
    if body.encoding_format == "base64":
        return base64.b64encode(numbers.tobytes()).decode()
    return numbers.tolist()
