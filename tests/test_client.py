"""`Client` and `AsyncClient` against the real HTTP server, and the binary stream they can read."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from toy_model import BROKEN, MODEL_NAME
from toy_server import running_server
from toy_worker import SLOW

from jaxserve import APIError, AsyncClient, Client, ConnectionFailed
from jaxserve.client.streams import event_data
from jaxserve.server.keys import Keys
from jaxserve.token_stream import LENGTH, End, Failure, Piece, Start, decode_frame

GREEDY = {"temperature": 0, "max_tokens": 20}
USER = [{"role": "user", "content": "hello"}]
BINARY = {"Accept": "application/x-msgpack"}


@pytest.fixture(scope="module")
def server():
    with running_server("--step-seconds", "0.002") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with Client(f"http://127.0.0.1:{server.port}", retries=1) as client:
        yield client


def frames(body: bytes) -> list:
    found = []
    while body:
        (length,) = LENGTH.unpack_from(body)
        found.append(decode_frame(body[LENGTH.size : LENGTH.size + length]))
        body = body[LENGTH.size + length :]
    return found


def text(parts) -> str:
    return "".join(part.text for part in parts if isinstance(part, Piece))


# The frames.


@pytest.mark.parametrize("chat", [False, True])
def test_frames_say_what_events_say_and_the_token_ids_besides(server, chat):
    asked = {"messages": USER} if chat else {"prompt": "hello", "n": 2}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = asked | GREEDY | {"stream": True}
    events = server.post(path, body)
    reply = server.post(path, body, **BINARY)
    assert reply.headers["Content-Type"] == "application/x-msgpack"
    start, *pieces, end = frames(reply.body)
    assert isinstance(start, Start) and start.model == MODEL_NAME
    assert isinstance(end, End)
    counted = 0
    for index in range(1 if chat else 2):
        mine = [piece for piece in pieces if piece.index == index]
        assert text(mine) == events.text(index)
        assert [p.finish_reason for p in mine if p.finish_reason] == [events.finish_reason(index)]
        counted += sum(len(piece.token_ids) for piece in mine)
    assert counted == end.completion_tokens
    assert end.prompt_tokens == len("hello") + chat


def test_frames_carry_logprobs_of_every_token(server):
    body = {"prompt": "hello", "stream": True, "logprobs": 2} | GREEDY
    _, *pieces, _ = frames(server.post("/v1/completions", body, **BINARY).body)
    ids = [token for piece in pieces for token in piece.token_ids]
    logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
    tops = [top for piece in pieces for top in piece.top_logprobs]
    assert logprobs == [-0.25] * len(ids)
    assert [top[0][0] for top in tops] == ids
    assert tops[0][1][1] == -9999.0, "minus infinity is no number here either"


def test_tokens_whose_text_is_held_back_come_with_it(server):
    body = {"prompt": [*"é".encode(), *b"abc"], "stream": True, "stop": "bc"} | GREEDY
    _, *pieces, end = frames(server.post("/v1/completions", body, **BINARY).body)
    assert pieces[0].token_ids == tuple("é".encode()) and pieces[0].text == "é"
    assert text(pieces) == "éa"
    assert sum(len(piece.token_ids) for piece in pieces) == end.completion_tokens


def test_a_stream_that_fails_ends_with_an_error_frame(server):
    body = {"prompt": [65, 66, BROKEN], "stream": True} | GREEDY
    *_, last = frames(server.post("/v1/completions", body, **BINARY).body)
    assert isinstance(last, Failure)
    assert last.kind == "server_error" and "internal error" in last.message


def test_a_refusal_before_the_stream_is_plain_http(server):
    reply = server.post("/v1/completions", {"prompt": "", "stream": True}, **BINARY)
    assert reply.status == 400 and reply.error["param"] == "prompt"


# The clients.


def test_answers_are_the_servers(server, client):
    reply = client.complete("hello", **GREEDY)
    assert reply["choices"][0]["text"] == server.complete("hello").text()
    reply = client.chat(USER, **GREEDY)
    assert reply["choices"][0]["message"]["content"] == server.chat("hello").text()
    assert client.models() == [MODEL_NAME] and client.first_model() == MODEL_NAME
    assert client.request("GET", "/version")["version"]


@pytest.mark.parametrize("binary", [False, True])
def test_streams_come_piece_by_piece_and_end_with_the_count(server, client, binary):
    *pieces, end = client.stream_completion("hello", binary=binary, logprobs=0, **GREEDY)
    assert text(pieces) == server.complete("hello").text()
    assert len(pieces) > 2 and pieces[-1].finish_reason == "stop"
    assert sum(len(piece.logprobs) for piece in pieces) == end.completion_tokens
    *pieces, end = client.stream_chat(USER, binary=binary, **GREEDY)
    assert text(pieces) == server.chat("hello").text()
    assert end.prompt_tokens == 6


@pytest.mark.parametrize("binary", [False, True])
def test_leaving_a_stream_ends_it_on_the_server(server, client, binary):
    tokens = server.metric("jaxserve_output_tokens_total")
    stream = client.stream_completion([SLOW] * 10, binary=binary, max_tokens=40, ignore_eos=True)
    for _ in zip(range(2), stream, strict=False):
        pass
    stream.close()
    assert server.becomes(server.is_idle)
    assert server.metric("jaxserve_output_tokens_total") - tokens < 40


def test_an_asynchronous_stream_that_is_left_or_cancelled_ends_on_the_server(server):
    async def main():
        async with AsyncClient(f"http://127.0.0.1:{server.port}") as client:
            stream = client.stream_completion([SLOW] * 10, max_tokens=40, ignore_eos=True)
            async for _ in stream:
                break
            await stream.aclose()
            asked = client.complete([SLOW] * 10, max_tokens=40, ignore_eos=True)
            task = asyncio.create_task(asked)
            await asyncio.sleep(0.03)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            answers = await asyncio.gather(*(client.complete(f"{i}", **GREEDY) for i in range(20)))
            assert [a["choices"][0]["text"] for a in answers] == [f"{i}" for i in range(20)]

    asyncio.run(main())
    assert server.becomes(server.is_idle)


def test_a_refusal_is_an_error_with_all_the_server_said(client):
    with pytest.raises(APIError) as caught:
        client.complete("hello", temperature=-1)
    error = caught.value
    assert (error.status, error.param, error.kind) == (400, "temperature", "invalid_request_error")
    assert "temperature is -1" in error.message
    with pytest.raises(APIError) as caught:
        next(client.stream_chat([], **GREEDY))
    assert caught.value.param == "messages"
    with pytest.raises(APIError) as caught:
        client.request("GET", "/no/such/path")
    assert caught.value.status == 404


@pytest.mark.parametrize("binary", [False, True])
def test_a_stream_that_breaks_off_is_an_error_after_what_came(client, binary):
    stream = client.stream_completion([65, 66, BROKEN], binary=binary, **GREEDY)
    came = []
    with pytest.raises(APIError, match="internal error"):
        came.extend(stream)
        came += [part for part in stream]
    stream = client.stream_completion([65, 66, BROKEN], binary=binary, **GREEDY)
    assert text([next(stream)]).startswith("A")
    stream.close()


def test_a_key_is_sent(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: the-key\n")
    with running_server(keys=Keys(file), uds=tmp_path / "socket") as _:
        with Client(f"unix:{tmp_path / 'socket'}", api_key="the-key") as client:
            assert client.complete("hello", **GREEDY)["choices"][0]["text"] == "hello"
        with Client(f"unix:{tmp_path / 'socket'}") as client:
            with pytest.raises(APIError) as caught:
                client.models()
            assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


@contextmanager
def scripted(*answers: tuple[int, dict[str, str], bytes], port: int = 0):
    """A server that gives these answers, and the times it was asked."""
    times: list[float] = []
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            times.append(time.monotonic())
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer()

        def do_GET(self):
            times.append(time.monotonic())
            self.answer()

        def answer(self):
            status, headers, body = left.pop(0)
            if status == HANGS_UP:
                return
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", times
        finally:
            server.shutdown()
            thread.join()


HANGS_UP = 0
"""In place of a status: the connection is closed without an answer."""
BUSY = json.dumps({"error": {"message": "busy", "type": "rate_limit_error"}}).encode()
GOOD = b'{"choices": [{"text": "at last"}]}'


def test_it_comes_again_when_it_is_told_to():
    busy = (429, {"Retry-After": "0.3"}, BUSY)
    with scripted(busy, busy, (200, {}, GOOD)) as (url, times), Client(url) as client:
        assert client.complete("hello")["choices"][0]["text"] == "at last"
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert len(waits) == 2 and all(wait >= 0.3 for wait in waits)


@pytest.mark.parametrize(
    ("answer", "settings", "retry_after"),
    [
        ((429, {"Retry-After": "3600"}, BUSY), {}, 3600),
        ((429, {"Retry-After": "0"}, BUSY), {"retries": 0}, 0),
        ((400, {"Retry-After": "0"}, BUSY), {}, 0),
        ((503, {}, b"<html>"), {"retries": 0}, None),
    ],
)
def test_it_does_not_come_again_for_nothing(answer, settings, retry_after):
    with scripted(answer) as (url, times), Client(url, **settings) as client:
        with pytest.raises(APIError) as caught:
            client.complete("hello")
        assert (caught.value.status, caught.value.retry_after) == (answer[0], retry_after)
    assert len(times) == 1


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Content-Type": "text/event-stream"}, b'data: {"choices": []}\n\n'),
        ({"Content-Type": "application/x-msgpack"}, b"\x05\x00\x00\x00ab"),
        ({"Content-Type": "application/x-msgpack"}, b"\xff\xff\xff\xff"),
        ({"Content-Type": "application/x-msgpack"}, b"\x01\x00\x00\x00\xc0"),
        ({"Content-Type": "text/event-stream", "Content-Length": "999"}, b""),
    ],
)
def test_a_stream_that_is_cut_is_never_taken_for_a_whole_one(headers, body):
    answer = (200, headers, body)
    with scripted(answer) as (url, _), Client(url, timeout=0.5) as client:
        stream = client.stream_completion("hello", binary=True)
        with pytest.raises(ConnectionFailed):
            list(stream)


@pytest.mark.parametrize(
    "data",
    [
        b"{oops",
        b"5",
        b'{"choices": 5}',
        b'{"choices": [{"delta": {}}]}',
        b'{"choices": [{"index": 0, "delta": {"content": 5}}]}',
        b'{"choices": [{"index": 0, "delta": {"tool_calls": [{"function": {}}]}}]}',
        b'{"choices": [], "usage": {"prompt_tokens": 5}}',
        b"\xff",
    ],
)
def test_an_event_that_is_no_piece_of_an_answer_is_an_error_of_the_clients_own(data):
    body = b"data: " + data + b"\n\ndata: [DONE]\n\n"
    answer = (200, {"Content-Type": "text/event-stream"}, body)
    wrong = pytest.raises(ConnectionFailed, match="an event is none of a completion")
    with scripted(answer) as (url, _), Client(url) as client, wrong:
        list(client.stream_chat(USER))


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"data": 5}', b'{"data": [{}]}'])
def test_models_that_are_no_list_of_models_are_an_error_of_the_clients_own(body):
    wrong = pytest.raises(ConnectionFailed, match="/v1/models did not answer with a")
    with scripted((200, {}, body)) as (url, _), Client(url) as client, wrong:
        client.models()


def test_a_server_without_a_model_is_said():
    none = pytest.raises(ConnectionFailed, match="serves no model")
    with scripted((200, {}, b'{"data": []}')) as (url, _), Client(url) as client, none:
        client.first_model()


def test_a_stream_that_falls_silent_is_given_up():
    headers = {"Content-Length": "999", "Connection": "keep-alive"}
    answer = (200, headers | {"Content-Type": "text/event-stream"}, b"data: ")
    silent = pytest.raises(ConnectionFailed, match="said nothing for too long")
    with scripted(answer) as (url, _), Client(url, timeout=0.2) as client, silent:
        list(client.stream_chat(USER))


def test_an_event_of_any_length_is_read_in_a_time_in_proportion_to_it():
    class Content:
        async def iter_any(self):
            yield b"data: "
            for _ in range(50_000):
                yield b"x" * 100
            yield b"\r\n\r"
            yield b"\ndata: y\n\n"

    async def main():
        return [event async for event in event_data(Content())]

    started = time.perf_counter()
    long, short = asyncio.run(main())
    assert len(long) == 5_000_000 and short == b"y"
    assert time.perf_counter() - started < 5, "joined again for every 100 bytes it takes minutes"


def test_what_the_server_may_have_begun_is_not_asked_of_it_twice():
    with scripted((HANGS_UP, {}, b""), (200, {}, GOOD)) as (url, times), Client(url) as client:
        with pytest.raises(ConnectionFailed, match="did not answer"):
            client.complete("hello")
        assert len(times) == 1
    models = b'{"data": [{"id": "m"}]}'
    with scripted((HANGS_UP, {}, b""), (200, {}, models)) as (url, times), Client(url) as client:
        assert client.models() == ["m"], "what only reads is asked again"
        assert len(times) == 2


def test_it_comes_again_where_nobody_listened_yet():
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]  # nobody's in a moment
    with Client(f"http://127.0.0.1:{port}") as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.complete, "hello")
        time.sleep(0.1)
        with scripted((200, {}, GOOD), port=port) as (_, times):
            assert asked.result(10)["choices"][0]["text"] == "at last"
            assert len(times) == 1


def test_events_of_other_servers_are_read_too():
    chunk = {"choices": [{"index": 0, "delta": {"content": "é"}}], "usage": None}
    body = b": comment\r\n\r\nevent: x\r\ndata:" + json.dumps(chunk, ensure_ascii=False).encode()
    body += b"\r\n\r\ndata: [DONE]\r\n\r\n"
    answer = (200, {"Content-Type": "text/event-stream"}, body)
    with scripted(answer) as (url, _), Client(url + "/v1/") as client:
        assert list(client.stream_chat(USER, binary=True)) == [Piece(0, text="é")]


def test_nobody_there_is_said_at_once():
    client = Client("http://127.0.0.1:9", retries=0)
    with client, pytest.raises(ConnectionFailed, match=r"cannot reach http://127\.0\.0\.1:9"):
        client.complete("hello")
    client.close()
