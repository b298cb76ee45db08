"""POST /tokenize and /detokenize, as vLLM has them: what a prompt is in tokens, and the reverse.

Needs the tokenizer and no worker. One text at a time is worked on, in a thread, so that however
many are sent the prompts of requests that generate wait for one of them at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from jaxserve.errors import Overloaded, RequestError
from jaxserve.server.answer import read_json
from jaxserve.server.logprobs import token_text
from jaxserve.server.openai import ChatBody, Message, Tool, decode_body
from jaxserve.server.prompts import chat_prompt, check_vocabulary
from jaxserve.server.replies import json_response
from jaxserve.server.service import SERVICE, Service
from jaxserve.server.tools import tool_use

MAX_WAITING = 64
"""Texts accepted and not yet answered; each is a body in memory."""
MAX_DETOKENIZED = 1 << 18
"""Tokens of one /detokenize. Putting text together holds the interpreter, 0.1 s for so many."""


class TokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a prompt or messages. None stands for absent everywhere.

    Attributes:
        prompt: a plain text.
        messages: a chat, for the model's template.
        add_special_tokens: begin a plain text with BOS where the model wants it, as
            /v1/completions does. A chat has what its template writes.
        add_generation_prompt, chat_template_kwargs, tools: as in /v1/chat/completions.
        return_token_strs: tell the text of each token as well.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int] | None = None


class Tokens(msgspec.Struct, frozen=True):
    """The answer of /tokenize.

    Attributes:
        count: of `tokens`.
        max_model_len: most tokens, prompt and output together, of one sequence.
        tokens: ids.
        token_strs: the text of each, if asked for; parts of a character are spelled out.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """The answer of /detokenize: the text, special tokens by their names."""

    prompt: str


async def tokenize(http: web.Request) -> web.Response:
    """POST /tokenize."""
    return await respond(http, tokens_of)


async def detokenize(http: web.Request) -> web.Response:
    """POST /detokenize."""
    return await respond(http, text_of)


Reply = TypeVar("Reply", Tokens, Detokenized)


async def respond(http: web.Request, work: Callable[[Service, bytes], Reply]) -> web.Response:
    """Read the body and do the work when its turn comes. Raises Overloaded if too many wait."""
    service = http.app[SERVICE]
    body = await read_json(http)
    if service.num_tokenizing >= MAX_WAITING:
        raise Overloaded(f"{MAX_WAITING} texts wait to be tokenized: try again", retry_after=1.0)
    service.num_tokenizing += 1
    try:
        async with service.tokenizing:
            loop = asyncio.get_running_loop()
            return json_response(await loop.run_in_executor(service.pool, work, service, body))
    finally:
        service.num_tokenizing -= 1


def tokens_of(service: Service, raw: bytes) -> Tokens:
    """Raises RequestError for neither or both of prompt and messages, and what else is wrong."""
    body = decode_body(raw, TokenizeBody)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt, a string, or messages", param="prompt")
    if body.messages is not None:
        ids = list(chat_ids(service, body))
    elif body.prompt is not None:
        ids = text_ids(service, body, body.prompt)
    return Tokens(len(ids), service.max_context, ids, token_strings(service, body, ids))


def text_ids(service: Service, body: TokenizeBody, text: str) -> list[int]:
    """The tokens of a plain text. An empty one has none."""
    for name in ("add_generation_prompt", "chat_template_kwargs", "tools"):
        if getattr(body, name) is not None:
            raise RequestError(f"{name} is for messages: leave it out with prompt", param=name)
    if body.add_special_tokens is False:
        return service.tokenizer.encode(text, param="prompt")
    return service.tokenizer.encode_prompt(text)


def chat_ids(service: Service, body: TokenizeBody) -> tuple[int, ...]:
    """The tokens /v1/chat/completions would continue."""
    if body.add_special_tokens:
        raise RequestError(
            "add_special_tokens is for prompt: the special tokens of messages are those of the "
            "model's template; leave it out or send false",
            param="add_special_tokens",
        )
    chat = ChatBody(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
    )
    use = tool_use(chat, service.tokenizer, service.habits.calls)
    return chat_prompt(chat, service.tokenizer, None if use is None else use.tools).ids


def token_strings(service: Service, body: TokenizeBody, ids: list[int]) -> list[str] | None:
    """The text of each token, as log-probabilities show it, if the client asks."""
    if not body.return_token_strs:
        return None
    return [token_text(service.tokenizer.token_bytes(token_id)) for token_id in ids]


def text_of(service: Service, raw: bytes) -> Detokenized:
    """Raises RequestError for no list, too many tokens, or an id the model lacks."""
    body = decode_body(raw, DetokenizeBody)
    service.check_model(body.model)
    if body.tokens is None:
        raise RequestError("tokens is missing: a list of token ids", param="tokens")
    if len(body.tokens) > MAX_DETOKENIZED:
        raise RequestError(
            f"tokens has {len(body.tokens)} ids; at most {MAX_DETOKENIZED} are taken at once",
            param="tokens",
        )
    check_vocabulary(body.tokens, "tokens", service.model.vocab_size, param="tokens")
    return Detokenized(service.tokenizer.decode(body.tokens, skip_special_tokens=False))
