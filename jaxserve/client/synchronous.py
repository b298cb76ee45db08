"""`Client`: the same for programs without an event loop. It runs one in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from jaxserve.client.asynchronous import AsyncClient, Messages, Reply
from jaxserve.client.chunks import Part

T = TypeVar("T")


class Client:
    """A client of one server. Close it, or leave its `with` block. Threads may share one.

    Methods, arguments and errors are those of `AsyncClient`. A stream is an iterator; whoever
    closes it, or drops it half read, ends the request on the server too.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000", **settings: Any) -> None:
        """`settings`: as of `AsyncClient`. Nothing is sent yet."""
        self._client = AsyncClient(url, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="jaxserve client", daemon=True
        )
        self._thread.start()

    def complete(self, prompt: str | Sequence[Any], **parameters: Any) -> Reply:
        """The answer of /v1/completions."""
        return self._wait(self._client.complete(prompt, **parameters))

    def chat(self, messages: Messages, **parameters: Any) -> Reply:
        """The answer of /v1/chat/completions."""
        return self._wait(self._client.chat(messages, **parameters))

    def stream_completion(
        self, prompt: str | Sequence[Any], *, binary: bool = False, **parameters: Any
    ) -> Iterator[Part]:
        """The pieces of a completion, and at the end the count of tokens."""
        return self._iterate(self._client.stream_completion(prompt, binary=binary, **parameters))

    def stream_chat(
        self, messages: Messages, *, binary: bool = False, **parameters: Any
    ) -> Iterator[Part]:
        """The pieces of a chat's answer."""
        return self._iterate(self._client.stream_chat(messages, binary=binary, **parameters))

    def models(self) -> list[str]:
        """The names of the models that are served."""
        return self._wait(self._client.models())

    def first_model(self) -> str:
        """The model to ask where nobody says which."""
        return self._wait(self._client.first_model())

    def request(self, method: str, path: str, body: object = None) -> Reply:
        """The JSON that any path answers with."""
        return self._wait(self._client.request(method, path, body))

    def close(self) -> None:
        """Close the connections and end the thread. A second time does nothing."""
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C among them: what nobody waits for is not left running
            future.cancel()
            raise

    def _iterate(self, parts: AsyncGenerator[Part, None]) -> Iterator[Part]:
        async def following() -> Part | None:
            return await anext(parts, None)

        try:
            while (part := self._wait(following())) is not None:
                yield part
        finally:
            if not self._loop.is_closed():
                self._wait(close(parts))


async def close(parts: AsyncGenerator[Part, None]) -> None:
    """End an asynchronous generator where it stands."""
    await parts.aclose()
