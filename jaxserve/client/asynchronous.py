"""`AsyncClient`: asks, streams, comes again when it is told to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from jaxserve.client.chunks import Part
from jaxserve.client.streams import api_error, read_events, read_frames
from jaxserve.errors import APIError, ConnectionFailed
from jaxserve.token_stream import CONTENT_TYPE

Reply = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RETRIED = (429, 503)
FIRST_DELAY = 0.5
"""Seconds before the first retry where the server does not say when to come again; then twice
that, and so on."""
KEEP_ALIVE = 4.0
"""Seconds that an idle connection is kept: fewer than servers do, so that none of them closes one
under a request."""


class AsyncClient:
    """A client of one server. Close it, or leave its `async with` block.

    Parameters of requests are keywords, as the API names them. A stream is an asynchronous
    iterator; whoever closes it, or drops it half read, ends the request on the server too.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = 600.0,
        retries: int = 2,
        max_wait: float = 60.0,
    ) -> None:
        """Nothing is sent yet.

        Args:
            url: of the server's root, or "unix:" and the path of its socket.
            api_key: sent with every request.
            model: named by requests that name none; None lets the server choose, if it does.
            timeout: seconds without a byte after which an answer is given up.
            retries: how often a request is sent again that was refused with 429 or 503, or did
                not reach the server: after `Retry-After`, if the server says so. What the server
                may have begun is not sent again, unless it only reads.
            max_wait: seconds; a longer `Retry-After` is not waited for.
        """
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._url = "http://localhost" if self._socket else url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=timeout)
        self._retries = retries
        self._max_wait = max_wait
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, prompt: str | Sequence[Any], **parameters: Any) -> Reply:
        """The answer of /v1/completions, as the server sends it.

        Raises:
            APIError: the server refused it, for the last time.
            ConnectionFailed: it could not be reached, or left.
        """
        return await self.request("POST", COMPLETIONS, self._body({"prompt": prompt}, parameters))

    async def chat(self, messages: Messages, **parameters: Any) -> Reply:
        """The answer of /v1/chat/completions. Raises as `complete`."""
        return await self.request("POST", CHAT, self._body({"messages": messages}, parameters))

    def stream_completion(
        self, prompt: str | Sequence[Any], *, binary: bool = False, **parameters: Any
    ) -> AsyncGenerator[Part, None]:
        """The pieces of a completion as they come, and at the end the count of tokens.

        `binary` asks for frames instead of text: they tell token ids, and cost less to read. Only
        jaxserve sends them.

        Raises:
            APIError: the server refused it, or broke it off.
            ConnectionFailed: it could not be reached, or the stream ended early.
        """
        return self._stream(COMPLETIONS, self._body({"prompt": prompt}, parameters), binary)

    def stream_chat(
        self, messages: Messages, *, binary: bool = False, **parameters: Any
    ) -> AsyncGenerator[Part, None]:
        """The pieces of a chat's answer. As `stream_completion`."""
        return self._stream(CHAT, self._body({"messages": messages}, parameters), binary)

    async def models(self) -> list[str]:
        """The names of the models that are served. Raises as `complete`."""
        reply = await self.request("GET", "/v1/models")
        try:
            return [str(model["id"]) for model in reply["data"]]
        except (KeyError, TypeError) as error:
            raise ConnectionFailed("/v1/models did not answer with a list of models") from error

    async def first_model(self) -> str:
        """The model to ask where nobody says which. Raises as `complete`, and if there is none."""
        models = await self.models()
        if not models:
            raise ConnectionFailed(f"{self._address} serves no model: start it with one")
        return models[0]

    async def request(self, method: str, path: str, body: object = None) -> Reply:
        """The JSON that any path answers with. Raises as `complete`."""
        response = await self._send(method, path, body, accept="application/json")
        async with response:
            try:
                found: Reply = msgspec.json.decode(await response.read(), type=Reply)
            except aiohttp.ClientError as error:
                raise ConnectionFailed(f"the answer broke off: {error}") from error
            except msgspec.DecodeError as error:
                raise ConnectionFailed(
                    f"{path} did not answer with a JSON object: {error}"
                ) from error
        return found

    async def close(self) -> None:
        """Close the connections. A second time does nothing."""
        if self._session is not None:
            await self._session.close()
        self._session = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _body(self, asked: Reply, parameters: Mapping[str, Any]) -> Reply:
        named = {} if self._model is None else {"model": self._model}
        return named | asked | dict(parameters)

    async def _stream(self, path: str, body: Reply, binary: bool) -> AsyncGenerator[Part, None]:
        options = {"include_usage": True} | dict(body.get("stream_options") or {})
        body = body | {"stream": True, "stream_options": options}
        accept = f"{CONTENT_TYPE}, text/event-stream" if binary else "text/event-stream"
        response = await self._send("POST", path, body, accept=accept)
        try:
            read = read_frames if response.content_type == CONTENT_TYPE else read_events
            async with aclosing(read(response.content)) as parts:
                async for part in parts:
                    yield part
        except TimeoutError as error:  # aiohttp's is a ClientError too
            raise ConnectionFailed("the server said nothing for too long") from error
        except aiohttp.ClientError as error:
            raise ConnectionFailed(f"the stream broke off: {error}") from error
        finally:
            response.close()  # the connection too: the server notices, and stops

    async def _send(
        self, method: str, path: str, body: object, *, accept: str
    ) -> aiohttp.ClientResponse:
        """A response with a status below 400; refusals that may pass are waited for."""
        raw = None if body is None else msgspec.json.encode(body)
        for attempt in range(self._retries + 1):
            delay = FIRST_DELAY * 2**attempt
            try:
                return await self._try(method, path, raw, accept)
            except APIError as error:
                wait = delay if error.retry_after is None else error.retry_after
                may_pass = error.status in RETRIED and wait <= self._max_wait
                if attempt == self._retries or not may_pass:
                    raise
            except aiohttp.ClientConnectorError as error:  # nothing was sent
                wait = delay
                if attempt == self._retries:
                    raise ConnectionFailed(f"cannot reach {self._address}: {error}") from error
            except (aiohttp.ClientError, TimeoutError) as error:
                wait = delay
                left = isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError)
                if attempt == self._retries or not left or method != "GET":
                    raise ConnectionFailed(f"{self._address} did not answer: {error}") from error
            await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    async def _try(
        self, method: str, path: str, raw: bytes | None, accept: str
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": accept}
        if raw is not None:
            headers["Content-Type"] = "application/json"
        response = await self._open().request(method, self._url + path, data=raw, headers=headers)
        if response.status < 400:
            return response
        async with response:
            text = await response.read()
            wait = seconds(response.headers.get("Retry-After"))
        try:
            body: object = msgspec.json.decode(text)
        except msgspec.DecodeError:
            body = text.decode(errors="replace") or response.reason
        raise api_error(response.status, body, wait)

    @property
    def _address(self) -> str:
        return self._socket or self._url

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:  # made here: it belongs to the loop that runs now
            connector: aiohttp.BaseConnector = (
                aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
                if self._socket is None
                else aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=KEEP_ALIVE)
            )
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=connector, timeout=self._timeout
            )
        return self._session


def seconds(header: str | None) -> float | None:
    """A Retry-After in seconds; None for one that is a date, or none."""
    try:
        value = float(header or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
