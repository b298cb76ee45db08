"""What runs and what waits can be seen, and ended, by whoever it belongs to."""

import json
import threading
from contextlib import contextmanager

import pytest
from toy_server import TIMEOUT, running_server

from jaxserve.frames import SequenceState
from jaxserve.inspection import inspect
from jaxserve.request import Request, SamplingParams
from jaxserve.sequence import Sequence
from jaxserve.server.keys import Keys

PROMPT = "A" * 40
SLOW = ("--step-seconds", "0.05", "--max-rows", "1")


@pytest.fixture(scope="module")
def server():
    """One row, 20 tokens a second: a second request waits."""
    with running_server(*SLOW) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left_behind(server):
    yield
    assert server.becomes(server.is_idle)
    assert listed(server) == []


@contextmanager
def asking(server, headers=None, path="/v1/completions", **fields):
    """A request under way; its reply is what the list gets in the end."""
    replies = []
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24} | fields
    raw = json.dumps({k: v for k, v in body.items() if v is not None}).encode()
    kind = {"Content-Type": "application/json"} | (headers or {})

    def ask():
        replies.append(server.request("POST", path, raw, kind))

    thread = threading.Thread(target=ask)
    before = server.service.client.num_open
    thread.start()
    assert server.becomes(lambda: server.service.client.num_open > before)
    yield replies
    thread.join(TIMEOUT)


def listed(server, headers=None):
    return server.request("GET", "/requests", headers=headers).json["requests"]


def abort(server, name, headers=None):
    return server.request("POST", f"/requests/{name}/abort", headers=headers)


def end_all(server):
    for entry in listed(server):
        abort(server, entry["id"])


def test_a_request_that_runs_and_one_that_waits_are_told_apart(server):
    with asking(server, user="ann", service_tier="flex"), asking(server, prompt="B", stream=True):
        assert server.becomes(lambda: (listed(server)[0]["output_tokens"] or 0) > 1)
        first, second = listed(server)
        assert first["id"].startswith("cmpl-")
        assert (first["state"], second["state"]) == ("decode", "waiting")
        assert (first["tenant"], first["service_class"]) == ("ann", "batch")
        assert (second["tenant"], second["service_class"]) == ("", "interactive")
        assert (first["prompt_tokens"], first["max_tokens"]) == (40, 24)
        assert first["computed_tokens"] >= 41
        assert first["pages"] == -(-first["computed_tokens"] // 16)
        assert (second["output_tokens"], second["pages"]) == (0, 0)
        assert 0 < first["ttft_seconds"] < first["age_seconds"] < TIMEOUT
        assert second["ttft_seconds"] is None
        assert (first["stream"], second["stream"]) == (False, True)
        end_all(server)


def test_choices_of_one_request_are_one_entry(server):
    with asking(server, n=3) as replies:
        assert server.becomes(lambda: (listed(server)[0]["output_tokens"] or 0) > 1)
        (entry,) = listed(server)
        assert (entry["choices"], entry["open"], entry["max_tokens"]) == (3, 3, 72)
        assert (entry["state"], entry["prompt_tokens"]) == ("decode", 40)
        assert abort(server, entry["id"]).json == {"id": entry["id"], "aborted": 3}
    assert [choice["finish_reason"] for choice in replies[0].json["choices"]] == ["abort"] * 3


def test_a_request_that_is_aborted_answers_with_what_there_is(server):
    with asking(server) as replies:
        assert server.becomes(lambda: (listed(server)[0]["output_tokens"] or 0) > 2)
        reply = abort(server, listed(server)[0]["id"])
        assert reply.status == 200
        assert reply.headers["Cache-Control"] == "no-store"
    (choice,) = replies[0].json["choices"]
    assert choice["finish_reason"] == "abort"
    assert 2 < len(choice["text"]) < 24
    assert choice["text"] == PROMPT[: len(choice["text"])]
    assert replies[0].json["usage"]["completion_tokens"] == len(choice["text"])


def test_a_stream_that_is_aborted_ends_properly(server):
    with asking(server, stream=True, stream_options={"include_usage": True}) as replies:
        assert server.becomes(lambda: (listed(server)[0]["output_tokens"] or 0) > 2)
        abort(server, listed(server)[0]["id"])
    assert replies[0].finish_reason() == "abort"
    assert replies[0].events[-1]["usage"]["completion_tokens"] == len(replies[0].text())


def test_a_request_that_waits_can_be_aborted(server):
    with asking(server), asking(server, prompt="B") as replies:
        assert server.becomes(lambda: [e["state"] for e in listed(server)] == ["decode", "waiting"])
        assert abort(server, listed(server)[1]["id"]).json["aborted"] == 1
        assert server.becomes(lambda: len(replies) == 1)
        assert replies[0].finish_reason() == "abort"
        assert replies[0].text() == ""
        assert len(listed(server)) == 1  # the other one goes on
        end_all(server)


def test_what_was_held_back_for_a_stop_string_is_in_the_answer(server):
    with asking(server, prompt="ab" * 20, stop=["aba!"]) as replies:
        assert server.becomes(lambda: (listed(server)[0]["output_tokens"] or 0) > 3)
        abort(server, listed(server)[0]["id"])
    assert len(replies[0].text()) == replies[0].json["usage"]["completion_tokens"]


def test_an_id_nobody_has_is_not_found(server):
    reply = abort(server, "cmpl-nobody")
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert "cmpl-nobody" in reply.error["message"]
    assert server.request("GET", "/requests/cmpl-nobody/abort").status == 405


def test_a_key_sees_and_ends_its_own_requests_only(tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: key-a\nbob: key-b\n")
    ann, bob = ({"Authorization": f"Bearer {key}"} for key in ("key-a", "key-b"))
    with running_server(*SLOW, keys=Keys(file)) as server, asking(server, headers=ann) as replies:
        (entry,) = listed(server, ann)
        assert entry["tenant"] == "ann"
        assert listed(server, bob) == []
        assert abort(server, entry["id"], bob).status == 404
        assert len(listed(server, ann)) == 1
        assert abort(server, entry["id"], ann).status == 200
    assert replies[0].finish_reason() == "abort"


def test_a_worker_that_does_not_answer_leaves_its_part_out(server, monkeypatch):
    monkeypatch.setattr("jaxserve.server.client.INSPECTION_TIMEOUT", 0.0)
    with asking(server):
        (entry,) = listed(server)
        assert (entry["state"], entry["pages"], entry["computed_tokens"]) == (None, None, None)
        assert entry["prompt_tokens"] == 40
        monkeypatch.undo()
        end_all(server)


def sequence(name, *, slot=-1, computed=0, pages=0, drawn=0, preemptions=0):
    request = Request(name, tuple(range(20)), SamplingParams(max_tokens=9))
    made = Sequence(request, [*range(20), *range(drawn)])
    made.slot, made.num_computed, made.num_preemptions = slot, computed, preemptions
    made.pages.extend(range(1, pages + 1))
    return made


def test_a_scheduler_s_sequences_have_phases():
    running = [
        sequence("prompt", slot=0, computed=16, pages=2),
        sequence("draws", slot=1, computed=21, pages=2, drawn=2),
    ]
    waiting = [sequence("new"), sequence("lost", drawn=3, preemptions=1)]
    assert inspect(running, waiting).sequences == (
        SequenceState("prompt", "prefill", 16, 2),
        SequenceState("draws", "decode", 21, 2),
        SequenceState("new", "waiting"),
        SequenceState("lost", "preempted", preemptions=1),
    )
