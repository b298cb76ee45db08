"""Who may ask, how much, and over what: API keys, their limits, origins, TLS, Unix sockets."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import ssl

import pytest
from fixture_files import FIXTURES
from toy_model import MODEL
from toy_server import TIMEOUT, Server, running_server

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.app import make_app
from jaxserve.server.keys import Keys, parse_keys
from jaxserve.server.listen import load_certificate, make_tls, refuse_taken
from jaxserve.server.rates import RateLimited, Rates

ANN, BOB, EVE = ({"Authorization": f"Bearer {key}"} for key in ("key-of-ann", "key-of-bob", "x"))
KEYS = "# who may ask\nann: key-of-ann\n\nann: second-of-ann\nbob: key-of-bob\n"
TLS = FIXTURES / "tls"
PREFLIGHT = {"Access-Control-Request-Method": "POST"}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEYS)
    return file


@pytest.fixture(scope="module")
def server(key_file):
    with running_server(
        keys=Keys(key_file, "key-of-env"), allow_origin=("https://chat.example.org",)
    ) as server:
        yield server


def ask(server: Server, headers, **fields):
    body = {"prompt": "hello", "max_tokens": 5, "temperature": 0} | fields
    return server.post("/v1/completions", body, **headers)


@pytest.mark.parametrize(
    "key", ["key-of-ann", "second-of-ann", "key-of-bob", "key-of-env"], ids=lambda key: key
)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_a_known_key_is_served(server, key, scheme):
    assert ask(server, {"Authorization": f"{scheme} {key}"}).text() == "hello"


@pytest.mark.parametrize(
    "given", ["", "key-of-ann", "Bearer", "Bearer ", "Basic key-of-ann", "Bearer x", "Bearer ann"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/no/such/path"])
def test_without_a_known_key_nothing_is_said_but_401(server, path, given):
    reply = server.post(path, b"not even JSON", **({"Authorization": given} if given else {}))
    assert reply.status == 401
    assert reply.headers["WWW-Authenticate"].startswith("Bearer")
    assert reply.headers["X-Request-Id"]
    error = reply.error
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "key-of" not in error["message"]


def test_health_version_and_metrics_are_open(server):
    for path in ("/health", "/version", "/metrics"):
        assert server.request("GET", path).status == 200
    assert server.request("GET", "/v1/models").status == 401
    assert server.request("GET", "/v1/models", headers=ANN).status == 200


def test_metrics_can_need_a_key(key_file):
    with running_server(keys=Keys(key_file), metrics_need_key=True) as server:
        assert server.request("GET", "/metrics").status == 401
        assert server.request("GET", "/metrics", headers=BOB).status == 200
        assert server.request("GET", "/health").status == 200


def test_the_keys_name_is_the_tenant_in_the_log_and_the_metrics(server, caplog):
    with caplog.at_level(logging.INFO, logger="jaxserve.access"):
        ask(server, ANN, user="somebody else")
        ask(server, EVE)
    served, refused = (json.loads(record.message) for record in caplog.records)
    assert served["tenant"] == served["generated"]["tenant"] == "ann"
    assert "tenant" not in refused and refused["status"] == 401
    assert "key-of" not in caplog.text
    requests = server.metric('jaxserve_key_requests_total{key="ann",outcome="ok"}')
    assert requests >= 1
    tokens = 'jaxserve_key_tokens_total{key="ann",kind="%s"}'
    before = server.metric(tokens % "prompt"), server.metric(tokens % "output")
    ask(server, ANN, n=2)
    assert server.metric('jaxserve_key_requests_total{key="ann",outcome="ok"}') == requests + 1
    assert server.metric(tokens % "prompt") == before[0] + 5
    assert server.metric(tokens % "output") == before[1] + 10
    assert "key-of" not in server.request("GET", "/metrics").body.decode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no API keys"),
        ("# none\n", "has no API keys"),
        ("good: key\nann:\n", "line 2"),
        ("a b: key\n", "line 1"),
        ("two words\n", "line 1"),
        ("ann: same-key\nbob: same-key\n", "line 2: 'ann' has the same key"),
    ],
)
def test_a_key_file_that_cannot_be_meant_is_refused_without_showing_keys(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_keys(text, "keys")
    assert "same-key" not in str(caught.value)


def test_a_key_without_a_name_is_named_by_its_digest():
    (name,) = parse_keys("sk-secret\n", "keys").values()
    assert name.startswith("key-") and "secret" not in name


def test_a_key_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: old\n")
    keys = Keys(file)
    assert keys.find("Bearer old").name == "ann"
    file.write_text("ann: new\n")
    keys.reload()
    assert keys.find("Bearer old") is None and keys.find("Bearer new").name == "ann"
    file.write_text("ann:\n")
    with pytest.raises(ConfigError):
        keys.reload()
    assert keys.find("Bearer new").name == "ann"
    with pytest.raises(ConfigError, match="No such file"):
        Keys(tmp_path / "none")


# Limits per key.


def test_a_key_may_ask_so_often_and_is_told_when_again(key_file):
    with running_server(keys=Keys(key_file), requests_per_minute=2) as server:
        first, second = ask(server, ANN), ask(server, ANN)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert second.headers["x-ratelimit-remaining-requests"] == "0"
        assert 59 < float(second.headers["x-ratelimit-reset-requests"].rstrip("s")) <= 60
        refused = ask(server, ANN)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert 25 < int(refused.headers["Retry-After"]) <= 30
        assert "2 requests a minute" in refused.error["message"]
        assert server.metric('jaxserve_refused_total{reason="rate"}') == 1
        assert ask(server, BOB).status == 200, "another key has a bucket of its own"
        assert ask(server, EVE).status == 401
        assert server.request("GET", "/v1/models", headers=ANN).status == 200


def test_a_key_may_have_so_many_tokens_of_prompts_and_output(key_file):
    with running_server(keys=Keys(key_file), tokens_per_minute=30) as server:
        assert ask(server, ANN, n=2).status == 200
        remaining = server.service.rates.headers("ann")["x-ratelimit-remaining-tokens"]
        assert remaining == "15"
        refused = ask(server, ANN, prompt="A" * 20)
        assert refused.status == 429
        assert 8 <= int(refused.headers["Retry-After"]) <= 10
        streamed = ask(server, ANN, stream=True)
        assert streamed.text() == "hello"
        assert streamed.headers["x-ratelimit-limit-tokens"] == "30"
        assert ask(server, BOB, prompt="A" * 40).status == 200, "the bucket was full"


def test_a_bucket_fills_within_a_minute_and_debts_are_waited_off():
    now = 0.0
    rates = Rates(None, 60, clock=lambda: now)
    rates.admit("ann", "requests", 1)
    assert "x-ratelimit-limit-requests" not in rates.headers("ann")
    rates.admit("ann", "tokens", 60)
    rates.spend("ann", "tokens", 30)
    with pytest.raises(RateLimited) as refused:
        rates.admit("ann", "tokens", 10)
    assert refused.value.retry_after == pytest.approx(40)
    now = 39.9
    with pytest.raises(RateLimited):
        rates.admit("ann", "tokens", 10)
    now = 40.1
    rates.admit("ann", "tokens", 10)
    now = 1e6
    assert rates.headers("ann")["x-ratelimit-remaining-tokens"] == "60"


def test_limits_of_keys_need_keys():
    config = ServerConfig(requests_per_minute=1)
    with pytest.raises(ConfigError, match="--api-key-file"):
        make_app(config, model_name="m", model=MODEL, tokenizer=None, worker_argv=["none"])


# Web pages of other origins.


def test_a_browser_may_ask_before_it_has_a_key(server):
    reply = server.request(
        "OPTIONS",
        "/v1/chat/completions",
        headers=PREFLIGHT
        | {
            "Origin": "https://chat.example.org",
            "Access-Control-Request-Headers": "authorization,x-mine",
        },
    )
    assert reply.status == 204
    assert reply.headers["Access-Control-Allow-Origin"] == "https://chat.example.org"
    assert reply.headers["Access-Control-Allow-Headers"] == "authorization,x-mine"
    assert "POST" in reply.headers["Access-Control-Allow-Methods"]


@pytest.mark.parametrize("headers", [ANN, EVE])
def test_answers_and_refusals_can_be_read_by_the_page(server, headers):
    reply = ask(server, headers | {"Origin": "https://chat.example.org"})
    assert reply.headers["Access-Control-Allow-Origin"] == "https://chat.example.org"
    assert "X-Request-Id" in reply.headers["Access-Control-Expose-Headers"]
    assert reply.headers["Vary"] == "Origin"


def test_other_origins_get_no_leave(server):
    evil = {"Origin": "https://evil.example.org"}
    assert server.request("OPTIONS", "/v1/models", headers=PREFLIGHT | evil).status == 401
    assert "Access-Control-Allow-Origin" not in ask(server, ANN | evil).headers


def test_any_origin_may_be_welcome():
    with running_server(allow_origin=("*",)) as server:
        reply = ask(server, {"Origin": "null"})
        assert reply.headers["Access-Control-Allow-Origin"] == "*"
        assert "Vary" not in reply.headers


# What it is reached by.


def test_it_speaks_tls_and_takes_a_new_certificate(tmp_path):
    pair = tmp_path / "cert.pem", tmp_path / "key.pem"

    def use(name):
        for file, kind in zip(pair, ("crt", "key"), strict=True):
            file.write_bytes((TLS / f"{name}.{kind}").read_bytes())

    def peer(port):
        context = ssl.create_default_context(cadata=pair[0].read_text())
        connection = http.client.HTTPSConnection(
            "127.0.0.1", port, context=context, timeout=TIMEOUT
        )
        connection.request("GET", "/health")
        certificate = connection.sock.getpeercert()
        assert connection.getresponse().status == 200
        connection.close()
        return dict(pairs[0] for pairs in certificate["subject"])["commonName"]

    use("one")
    config = ServerConfig(ssl_certfile=pair[0], ssl_keyfile=pair[1])
    with running_server(ssl_certfile=pair[0], ssl_keyfile=pair[1]) as server:
        assert server.greetings[0].startswith("jaxserve ready on https://")
        assert peer(server.port) == "one.test"
        use("two")
        server.reload()
        assert peer(server.port) == "two.test"
        pair[1].write_text("no key at all")
        server.reload()
        assert peer(server.port) == "two.test"
    with pytest.raises(ConfigError, match="PEM files"):
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config)


def test_a_key_without_a_certificate_is_refused():
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        make_tls(ServerConfig(ssl_keyfile=TLS / "one.key"))


def test_a_certificate_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.crt"):
        make_tls(ServerConfig(ssl_certfile=TLS / "nowhere.crt"))


def test_it_listens_on_a_unix_socket_and_takes_over_a_dead_one(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with running_server(uds=path) as server:
        assert server.greetings[0].startswith(f"jaxserve ready on unix:{path} ")
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(TIMEOUT)
            client.connect(str(path))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConfigError, match="listens on"):
            refuse_taken(path)
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        refuse_taken(file)
