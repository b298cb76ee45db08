"""A worker that dies, hangs, gives up or never starts: clients hear of it, the server goes on."""

import asyncio
import logging
import os
import sys
import threading

import pytest
from toy_model import BROKEN
from toy_server import TIMEOUT, WORKER, running_server, sse_lines, strict_json, toy_app
from toy_worker import DIE, ERROR, FAIL, HANG, SLOW

from jaxserve.config import ServerConfig
from jaxserve.frames import LENGTH
from jaxserve.server.run import Stop, serve
from jaxserve.server.supervisor import Patience, describe_exit, start_process


@pytest.fixture(scope="module")
def server():
    with running_server(heartbeat_timeout=0.4) as server:
        yield server


@pytest.fixture(autouse=True)
def the_server_recovers(server):
    yield
    assert server.becomes(lambda: server.request("GET", "/health").status == 200)
    assert server.complete("served again").text() == "served again"
    assert server.becomes(server.is_idle)


def give_up(command, caplog):
    """Run a server whose worker cannot work: its exit code and what it logged as errors."""

    async def main():
        config = ServerConfig(port=0)
        patience = Patience(5.0, first_delay=0.01, longest_delay=0.01)
        app = toy_app(config, command, patience)
        quiet = {"on_progress": lambda progress: None, "on_ready": lambda line: None}
        return await asyncio.wait_for(serve(app, config, Stop(), **quiet), TIMEOUT)

    exit_code = asyncio.run(main())
    return exit_code, [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]


FAULTS = [
    pytest.param(DIE, "exited with code 3|process ended", id="dies"),
    pytest.param(FAIL, "out of memory: the toy asked for too much", id="gives up"),
    pytest.param(HANG, "no sign of life", id="hangs"),
]


@pytest.mark.parametrize("fault, words", FAULTS)
def test_an_open_stream_gets_an_error_event_and_no_done(server, fault, words):
    reply = server.complete([*b"abc", SLOW, SLOW, fault], stream=True)
    *events, last = sse_lines(reply.body)
    said = "".join(strict_json(event.encode())["choices"][0]["text"] for event in events)
    assert said == "abc"
    error = strict_json(last.encode())["error"]
    assert (error["type"], set(error)) == ("server_error", {"message", "type", "param", "code"})
    assert any(word in error["message"] for word in words.split("|"))


@pytest.mark.parametrize("fault, words", FAULTS)
def test_an_open_request_without_a_stream_gets_500(server, fault, words):
    reply = server.complete([*b"abc", fault])
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert any(word in reply.error["message"] for word in words.split("|"))


def test_everyone_hears_of_it_at_once(server):
    replies = []

    def ask(**fields):
        replies.append(server.complete([SLOW] * 20, **fields))

    threads = [threading.Thread(target=ask, kwargs={"stream": i < 3}) for i in range(5)]
    for thread in threads:
        thread.start()
    assert server.becomes(lambda: server.service.client.num_open == 5)
    assert server.complete([DIE]).status == 500
    for thread in threads:
        thread.join(TIMEOUT)
    assert [reply.status for reply in replies].count(500) >= 2
    assert all(b"[DONE]" not in reply.body for reply in replies)


def test_a_failure_of_one_request_leaves_the_others_alone(server):
    results = []
    neighbour = threading.Thread(
        target=lambda: results.append(server.complete([SLOW, SLOW, *b"fine"]))
    )
    neighbour.start()
    failed = server.complete([*b"ab", ERROR])
    assert (failed.status, failed.error["message"]) == (500, "the toy refuses")
    one_of_two = server.complete([[*b"abcdef"], [ERROR]])
    assert one_of_two.status == 500
    neighbour.join(TIMEOUT)
    assert results[0].text() == "fine"


def test_a_fault_of_the_server_itself_is_an_error_without_its_insides(server, caplog):
    whole = server.complete([*b"ab", BROKEN])
    assert (whole.status, whole.error["type"]) == (500, "server_error")
    streamed = server.complete([*b"ab", SLOW, BROKEN], stream=True)
    *events, last = sse_lines(streamed.body)
    assert "".join(strict_json(event.encode())["choices"][0]["text"] for event in events) == "ab"
    error = strict_json(last.encode())["error"]
    assert error["message"] == whole.error["message"]
    assert "bug" not in error["message"]
    assert [r.exc_info[0] for r in caplog.records if r.levelname == "ERROR"] == [KeyError] * 2
    assert server.metric("jaxserve_broken_streams_total") >= 1


def test_no_request_waits_for_a_worker_that_is_not_there():
    with running_server("--start-seconds", "0.3") as server:
        assert server.complete([DIE]).status == 500
        reply = server.complete("too early")
        assert (reply.status, reply.error["code"]) == (503, "service_unavailable")
        assert int(reply.headers["Retry-After"]) >= 1
        health = server.request("GET", "/health")
        assert health.status == 503
        assert health.json["reason"].startswith("the worker is starting")
        assert server.request("GET", "/v1/models").status == 200
        assert server.request("GET", "/metrics").status == 200
        assert server.becomes(lambda: server.complete("a").status == 200)


def test_a_poisoned_worker_is_restarted_patiently_and_said_so(server, caplog):
    with caplog.at_level(logging.WARNING, logger="jaxserve.server"):
        for _ in range(3):
            assert server.complete([DIE]).status == 500
            assert server.becomes(lambda: server.request("GET", "/health").status == 200)
    warnings = [r.getMessage() for r in caplog.records if r.name == "jaxserve.server"]
    assert len(warnings) == 3
    assert all("exited with code 3" in warning for warning in warnings)


@pytest.mark.parametrize(
    "code, words", [(None, "closed"), (3, "code 3"), (-9, "SIGKILL"), (-11, "SIGSEGV")]
)
def test_the_end_of_a_process_is_described(code, words):
    assert words in describe_exit(code)


def test_progress_is_passed_on_and_the_ready_line_comes_once():
    with running_server() as server:
        assert server.progress == [("warming up", 1, 2)]
        server.complete([DIE])
        assert server.becomes(lambda: server.request("GET", "/health").status == 200)
        assert len(server.greetings) == 1
        assert f"http://127.0.0.1:{server.port} (model toy/echo, a toy)" in server.greetings[0]


@pytest.mark.parametrize("garbage", [LENGTH.pack(2**31), LENGTH.pack(4) + b"\xff\xff\xff\xff"])
def test_a_worker_that_sends_garbage_counts_as_dead(garbage, caplog):
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[-1]); "
        f"s.sendall({garbage!r}); s.recv(1)"
    )
    exit_code, lines = give_up([sys.executable, "-c", code], caplog)
    assert exit_code == 1
    assert "5 times" in lines[-1]


@pytest.mark.parametrize(
    "command, words",
    [
        ([*WORKER, "--fail", "no such device"], "no such device"),
        ([sys.executable, "-c", "raise SystemExit(7)"], "exited with code 7"),
        (["/nonexistent/worker"], "cannot be started"),
    ],
)
def test_the_server_gives_up_on_a_worker_that_never_starts(command, words, caplog):
    exit_code, lines = give_up(command, caplog)
    assert exit_code == 1
    assert "5 times" in lines[-1]
    assert words in lines[-1]
    assert "\n" not in lines[-1]


def test_the_server_does_not_retry_what_can_only_fail_again(caplog):
    exit_code, lines = give_up([*WORKER, "--fail", "no such model", "--final"], caplog)
    assert exit_code == 1
    assert "failed to start: no such model" in lines[-1]


@pytest.mark.parametrize("longest_step, survives", [(0.0, False), (1.0, True)])
def test_a_worker_whose_steps_are_long_is_not_taken_for_one_that_hangs(longest_step, survives):
    flags = ("--step-seconds", "0.4", "--longest-step", str(longest_step))
    with running_server(*flags, heartbeat_timeout=0.1) as server:
        reply = server.complete([*b"ab"], max_tokens=3)
        assert (reply.status == 200) == survives


@pytest.mark.parametrize("own", [None, "glibc.malloc.perturb=1"])
def test_the_worker_allocates_on_large_pages_unless_the_user_tuned_it(tmp_path, monkeypatch, own):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    found = tmp_path / "found"
    command = ["/bin/sh", "-c", f'printf %s "$GLIBC_TUNABLES $HOME" > {found}']

    async def run() -> None:
        process = await start_process(command)
        await process.wait()

    asyncio.run(run())
    assert found.read_text() == f"{own or 'glibc.malloc.hugetlb=1'} {os.environ['HOME']}"
