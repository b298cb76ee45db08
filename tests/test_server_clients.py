"""Clients that leave, stop reading or come in crowds: nobody else notices, nothing is left."""

import json
import socket
import threading
import time

import pytest
from toy_server import TIMEOUT, running_server
from toy_worker import SLOW

LONG = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server():
    """Slow enough that a client can leave in the middle: 5 ms a step, two rows."""
    with running_server("--step-seconds", "0.005", "--max-rows", "2") as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left_behind(server, caplog):
    yield
    assert server.becomes(server.is_idle)
    assert server.complete("still here").text() == "still here"
    ours = [record for record in caplog.records if record.name != "aiohttp.server"]
    assert not [record for record in ours if record.levelname == "ERROR"]


def send(server, body):
    """A raw connection that has sent a completion request."""
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(raw), raw)
    )
    return connection


def open_sequences(server, number):
    return lambda: server.service.client.num_open == number


@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_before_the_answer_ends_its_sequences(server, n):
    tokens = server.metric("jaxserve_output_tokens_total")
    with send(server, {"prompt": [65], "n": n} | LONG):
        assert server.becomes(open_sequences(server, n))
    assert server.becomes(server.is_idle)
    assert server.metric("jaxserve_output_tokens_total") - tokens < 40 * n


def test_a_client_that_leaves_a_stream_ends_it(server):
    with send(server, {"prompt": "A" * 20, "stream": True} | LONG) as connection:
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(4096) or pytest.fail("the stream ended early")
        assert server.service.client.num_open == 1
    assert server.becomes(server.is_idle)


def test_a_client_that_leaves_while_queued_is_never_served(server):
    running = [send(server, {"prompt": [SLOW] * 4} | LONG) for _ in range(2)]
    assert server.becomes(open_sequences(server, 2))
    with send(server, {"prompt": "queued"} | LONG):
        assert server.becomes(open_sequences(server, 3))
        assert server.becomes(lambda: server.service.client.metrics.worker.waiting == 1)
    assert server.becomes(open_sequences(server, 2))
    for connection in running:
        connection.close()


def test_the_partner_of_a_client_that_leaves_is_unharmed(server):
    results = []
    prompt = list(b"the very same prompt")
    partner = threading.Thread(target=lambda: results.append(server.complete(prompt, **LONG)))
    partner.start()
    with send(server, {"prompt": prompt} | LONG):
        assert server.becomes(open_sequences(server, 2))
    partner.join(TIMEOUT)
    assert results[0].text() == "the very same prompt"


def test_many_clients_that_leave_leave_nothing(server):
    for i in range(100):
        send(server, {"prompt": [65], "stream": i % 2 == 0} | LONG).close()
    assert server.becomes(server.is_idle)
    assert server.service.client._waiters == {}


def test_a_client_that_leaves_is_counted(server):
    label = 'jaxserve_requests_total{endpoint="/v1/completions",outcome="client_left"}'
    send(server, {"prompt": [65]} | LONG).close()
    with send(server, {"prompt": [65]} | LONG):
        assert server.becomes(open_sequences(server, 1))
    assert server.becomes(server.is_idle)
    assert server.metric(label) >= 1


def test_half_a_request_and_a_closed_line_do_no_harm(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as connection:
        connection.sendall(b"\x16\x03\x01nonsense\r\n\r\n")


def test_a_client_that_stops_reading_is_dropped():
    # Answers must be larger than the sockets' buffers: many choices with many alternatives.
    with running_server(write_timeout=0.2, max_pending=2000) as server:
        body = {"prompt": [65], "n": 128, "logprobs": 20, "stream": True} | LONG
        with send(server, body) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            assert server.becomes(lambda: server.service.active == 1)
            assert server.becomes(server.is_idle)
            assert server.complete("others are served").text() == "others are served"[:20]


def test_a_slow_reader_gets_everything(server):
    with send(server, {"prompt": "slowly", "stream": True, "temperature": 0}) as connection:
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(100) or pytest.fail("the stream ended early")
            time.sleep(0.001)
    assert b"data: [DONE]" in received


def test_too_many_sequences_are_refused_and_nobody_waits():
    with running_server("--step-seconds", "0.005", max_pending=4) as server:
        with send(server, {"prompt": [65], "n": 3} | LONG):
            assert server.becomes(open_sequences(server, 3))
            reply = server.complete("a", n=2)
            assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
            assert server.metric('jaxserve_refused_total{reason="pending"}') == 2
            assert reply.error["type"] == "rate_limit_error"
            assert int(reply.headers["Retry-After"]) >= 1
            assert server.complete("ok").text() == "ok"
            never = server.complete("a", n=5)
            assert (never.status, never.error["param"]) == (400, "n")
        assert server.becomes(server.is_idle)
        assert server.complete("a", n=4).status == 200


def test_metrics_tell_what_clients_saw(server):
    before = server.metric("jaxserve_time_to_first_token_seconds_count")
    server.complete("abc", n=2)
    server.complete("abc", stream=True)
    assert server.metric("jaxserve_time_to_first_token_seconds_count") == before + 3
    assert server.metric("jaxserve_inter_token_seconds_count") > 0
    assert server.metric("jaxserve_time_per_output_token_seconds_count") > 0
    assert server.metric("jaxserve_server_queue_seconds_count") > 0
    assert server.metric("jaxserve_queue_seconds_count") > 0
    assert 0 < server.metric("jaxserve_ttft_p95_seconds") < TIMEOUT
    assert 0 < server.metric("jaxserve_tpot_p95_seconds") < TIMEOUT
    assert server.metric("jaxserve_compilations_total") == 0
    label = 'jaxserve_requests_total{endpoint="/v1/completions",outcome="ok"}'
    assert server.metric(label) >= 2
    assert server.request("GET", "/metrics").headers["Content-Type"].startswith("text/plain")
