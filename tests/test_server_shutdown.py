"""SIGTERM and SIGINT: what runs may finish, the rest is told, and the process exits with 0."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from toy_model import MAX_CONTEXT
from toy_server import PATHS, TIMEOUT, WORKER, sse_lines, strict_json, toy_app
from toy_worker import SLOW

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.run import run
from jaxserve.server.supervisor import Patience

SERVER = """
import sys
from pathlib import PosixPath
sys.path[:0] = {paths}
from toy_server import WORKER, toy_app
from jaxserve.config import ServerConfig
from jaxserve.server.keys import Keys
from jaxserve.server.run import run
from jaxserve.server.supervisor import Patience

config = ServerConfig(port=0, drain_timeout={drain_timeout})
app = toy_app(config, WORKER + {flags!r}, Patience(5.0), keys=Keys({key_file}))
ready = lambda line: print(line, flush=True)
code = run(app, config, on_ready=ready)
print("modules:", *sorted(m for m in sys.modules if m.partition(".")[0] in ("jax", "flax")))
sys.exit(code)
"""


@contextmanager
def server_process(*flags, drain_timeout=5.0, key_file=None):
    """(process, port) of a server in a process of its own, which the test must end."""
    source = SERVER.format(
        paths=PATHS, drain_timeout=drain_timeout, flags=list(flags), key_file=repr(key_file)
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("jaxserve ready on "), line + process.stderr.read()
        yield process, int(line.split()[3].rsplit(":", 1)[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def stream(port, num_slow):
    """A connection with a stream that takes `num_slow` times 50 ms, after its first token."""
    prompt = [ord("a"), *[SLOW] * num_slow, ord("z")]
    body = {"prompt": prompt, "max_tokens": MAX_CONTEXT - len(prompt)}
    raw = json.dumps(body | {"stream": True, "temperature": 0})
    connection = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n{raw}".encode())
    received = b""
    while b"data: " not in received:
        part = connection.recv(4096)
        assert part, received
        received += part
    return connection, received


def rest(connection, received):
    """The events of a raw response, once it has ended."""
    while part := connection.recv(65536):
        received += part
    connection.close()
    chunks = received.split(b"\r\n\r\n", 1)[1]
    body = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        body, chunks = body + chunks[: int(size, 16)], chunks[int(size, 16) + 2 :]
    return sse_lines(body)


def health(port):
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return connection.recv(4096)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_exits_with_0_at_once(number):
    with server_process() as (process, _):
        process.send_signal(number)
        out, err = process.communicate(timeout=TIMEOUT)
        assert (process.returncode, err) == (0, "")
        assert out == "modules:\n"  # and neither jax nor flax was ever imported


def test_a_server_whose_worker_is_still_starting_stops_too():
    started = time.monotonic()
    config = ServerConfig(port=0)
    app = toy_app(config, [*WORKER, "--start-seconds", "60"], Patience(5.0))

    def stop(progress):
        signal.raise_signal(signal.SIGTERM)

    assert run(app, config, on_progress=stop) == 0
    assert time.monotonic() - started < 5


def test_a_running_stream_finishes_and_nobody_new_comes_in():
    with server_process() as (process, port):
        idle = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in idle.recv(4096)
        running = stream(port, num_slow=20)
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            try:
                health(port)
            except OSError:
                break  # the listener is closed
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = idle.recv(4096)
        idle.close()
        assert b"503" in answer.splitlines()[0]
        assert b"shutting down" in answer
        *events, done = rest(*running)
        assert done == "[DONE]"
        texts = [strict_json(event.encode())["choices"][0]["text"] for event in events]
        assert "".join(texts) == "az"
        process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0


def test_what_does_not_finish_in_time_gets_an_error_event():
    with server_process(drain_timeout=0.2) as (process, port):
        running = stream(port, num_slow=50)
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        events = rest(*running)
        assert events[-1] != "[DONE]"
        assert "shutting down" in strict_json(events[-1].encode())["error"]["message"]
        process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
        assert time.monotonic() - started < 2.4


def test_a_second_signal_does_not_wait():
    with server_process(drain_timeout=60.0) as (process, port):
        running = stream(port, num_slow=50)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # the loop must see two signals, not one
        process.send_signal(signal.SIGINT)
        assert "error" in strict_json(rest(*running)[-1].encode())
        process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0


def test_a_worker_does_not_outlive_a_server_that_was_killed():
    with server_process() as (process, _):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if not children.exists():
            pytest.skip("needs Linux's /proc")
        (worker,) = map(int, children.read_text().split())
        process.kill()
        process.communicate(timeout=TIMEOUT)
        deadline = time.monotonic() + TIMEOUT
        while is_running(worker):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def is_running(pid):
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def test_a_port_in_use_is_a_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{config.port}.*another port"):
            run(toy_app(config, WORKER, Patience(5.0)), config)


def test_a_hangup_reads_the_keys_again(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: old\n")

    def status(port, key):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": f"Bearer {key}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    with server_process(key_file=file) as (process, port):
        assert (status(port, "old"), status(port, "new")) == (200, 401)
        file.write_text("ann: new\n")
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + TIMEOUT
        while status(port, "new") != 200 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (status(port, "old"), status(port, "new")) == (401, 200)
        file.write_text("no: good: at all, this\n")
        process.send_signal(signal.SIGHUP)
        assert "nothing was changed" in process.stderr.readline()
        assert status(port, "new") == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0


def test_a_worker_on_its_way_out_is_not_asked_to_go(tmp_path):
    ending = f"""
import atexit, os, signal, sys
sys.path[:0] = {PATHS}
from jaxserve import worker
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGTERM), print("cleaned up")))
sys.exit(worker.main(["--config", "no settings", "--socket", {str(tmp_path / "s")!r}]))
"""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        done = subprocess.run(
            [sys.executable, "-c", ending], capture_output=True, text=True, timeout=60
        )
    assert (done.returncode, done.stdout) == (1, "cleaned up\n")
    assert "SystemExit" not in done.stderr
