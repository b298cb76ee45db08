"""The real HTTP server around the toy worker, in a thread, and small clients for it."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from toy_model import MAX_CONTEXT, MODEL, MODEL_NAME, ToyTokenizer

from jaxserve.config import ServerConfig
from jaxserve.frames import Progress
from jaxserve.server.app import make_app
from jaxserve.server.keys import Keys
from jaxserve.server.run import Stop, reload, serve
from jaxserve.server.service import SERVICE, Service
from jaxserve.server.supervisor import Patience

TIMEOUT = 10.0
PATHS = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
"""Where a process of its own finds the toys and, if it is not installed, jaxserve."""
WORKER = [
    sys.executable,
    "-c",
    f"import sys; sys.path[:0] = {PATHS}; import toy_worker as w; w.main()",
]


@dataclass
class Server:
    """A running server, as seen from another thread."""

    port: int = 0
    service: Service = field(init=False, repr=False)
    stop: Callable[[], object] = field(init=False, repr=False)
    reload: Callable[[], object] = field(init=False, repr=False)
    exit_code: list[int] = field(default_factory=list)
    greetings: list[str] = field(default_factory=list)
    progress: list[tuple[str, int, int]] = field(default_factory=list)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            connection.request(method, path, body=body, headers=dict(headers or {}))
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, raw, {"Content-Type": "application/json"} | headers)

    def complete(self, prompt: object, **fields: Any) -> Reply:
        """A completion that is greedy unless told otherwise."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 20} | fields
        return self.post("/v1/completions", body)

    def chat(self, text: str, **fields: Any) -> Reply:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"messages": messages, "temperature": 0} | fields)

    def metric(self, name: str) -> float:
        """One number of /metrics; `name` includes the labels."""
        for line in self.request("GET", "/metrics").body.decode().splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"/metrics has no {name}")

    def becomes(self, condition: Callable[[], bool]) -> bool:
        """Whether it is true now or within the time limit."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.01)
        return False

    def is_idle(self) -> bool:
        """Nothing is left of any request, here and in the worker."""
        client = self.service.client
        stats = client.metrics.worker
        return not (client.num_open or self.service.active or stats.running or stats.waiting)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return strict_json(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream that ended properly, without the [DONE]."""
        *events, done = sse_lines(self.body)
        assert done == "[DONE]"
        return [strict_json(event.encode()) for event in events]

    def text(self, index: int = 0) -> str:
        return "".join(choice_text(c) for c in self.choices(index))

    def finish_reason(self, index: int = 0) -> str:
        reasons = [c["finish_reason"] for c in self.choices(index)]
        assert all(reason is None for reason in reasons[:-1])
        return reasons[-1]

    def choices(self, index: int) -> list[dict[str, Any]]:
        """Everything said about one choice, whether it was streamed or not."""
        streamed = self.headers["Content-Type"].startswith("text/event-stream")
        replies = self.events if streamed else [self.json]
        return [c for reply in replies for c in reply["choices"] if c["index"] == index]


def choice_text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta", {})).get("content") or ""


def sse_lines(body: bytes) -> list[str]:
    blocks = body.decode("utf-8").split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def strict_json(body: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(body, parse_constant=refuse)


def toy_app(
    config: ServerConfig,
    command: list[str],
    patience: Patience,
    *,
    tokenizer: Any = "toy",
    write_timeout: float = 60.0,
    keys: Keys | None = None,
) -> web.Application:
    return make_app(
        config,
        model_name=MODEL_NAME,
        model=MODEL,
        tokenizer=ToyTokenizer() if tokenizer == "toy" else tokenizer,
        worker_argv=command,
        patience=patience,
        write_timeout=write_timeout,
        keys=keys,
    )


@contextmanager
def running_server(
    *worker_flags: str,
    write_timeout: float = 60.0,
    tokenizer: Any = "toy",
    keys: Keys | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """The server in a thread, ready for requests; stopped and joined at the end."""
    config = ServerConfig(
        **({"port": 0, "heartbeat_timeout": 5.0, "drain_timeout": 2.0} | settings)
    )
    patience = Patience(config.heartbeat_timeout, first_delay=0.02, longest_delay=0.05)
    command = [*WORKER, "--max-context", str(MAX_CONTEXT), *worker_flags]
    server = Server()
    ready = threading.Event()

    async def main() -> None:
        app = toy_app(
            config, command, patience, tokenizer=tokenizer, write_timeout=write_timeout, keys=keys
        )
        stop, loop = Stop(), asyncio.get_running_loop()
        server.service = app[SERVICE]
        server.stop = lambda: loop.call_soon_threadsafe(stop.ask)
        server.reload = lambda: loop.call_soon_threadsafe(reload, app)

        def greet(line: str) -> None:
            address = line.split()[3]
            if address.startswith("http"):
                server.port = int(address.rsplit(":", 1)[1])
            server.greetings.append(line)
            ready.set()

        def progress(frame: Progress) -> None:
            server.progress.append((frame.message, frame.done, frame.total))

        code = await serve(app, config, stop, on_progress=progress, on_ready=greet)
        server.exit_code.append(code)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(TIMEOUT)
        yield server
    finally:
        if thread.is_alive():
            server.stop()
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert server.exit_code == [0]


def refusal(reply: Reply, param: str | None = None) -> str:
    """The message of a 400 that blames `param`."""
    assert reply.status == 400, reply.body
    error = reply.error
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]
    return error["message"]
