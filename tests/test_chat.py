"""`jaxserve chat`: the conversation, its commands, a pipe, and a server that goes when it goes."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from engines import TINY
from toy_server import running_server

from checkpoints import DEFAULT_MODEL
from jaxserve import Client, EngineStopped
from jaxserve.chat.command import serve_arguments
from jaxserve.chat.conversation import Conversation
from jaxserve.chat.repl import converse
from jaxserve.child import child_server
from jaxserve.cli import main, make_parser

GREEDY = {"temperature": 0, "max_tokens": 30}


@pytest.fixture(scope="module")
def server():
    with running_server("--step-seconds", "0.01") as server:
        yield server


@pytest.fixture
def url(server):
    return f"http://127.0.0.1:{server.port}"


def talk(url: str, *lines: str | BaseException) -> tuple[str, Conversation]:
    """What is shown when these lines are typed; an exception happens in place of a line."""
    waiting, shown = list(lines), []

    def read() -> str:
        line = waiting.pop(0) if waiting else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    with Client(url) as client:
        conversation = Conversation(client, GREEDY, None)
        converse(conversation, read, shown.append)
    return "".join(shown), conversation


def test_every_turn_sees_what_was_said_before(url):
    shown, conversation = talk(url, "ab", "cd")
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    first, second = (conversation.messages[i]["content"] for i in (1, 3))
    assert first.startswith("ab") and second.startswith("ab" + first + "cd")
    assert shown.startswith(first + "\n" + second + "\n")


def test_commands_begin_anew_set_the_system_prompt_and_tell_of_the_last_answer(url):
    shown, conversation = talk(
        url, "/stats", "/system be brief", "/system", "ab", "/stats", "/reset", "/what"
    )
    assert "(no answer yet)" in shown and "be brief\nbe brief" in shown.replace("ab", "be brief\n")
    assert "first token after" in shown and "tokens" in shown and "/save FILE" in shown
    assert conversation.messages == [{"role": "system", "content": "be brief"}]
    assert conversation.stats.prompt_tokens > 0 and 0 < conversation.stats.ttft < 5


def test_a_conversation_can_be_saved(url, tmp_path):
    file = tmp_path / "chat.json"
    shown, conversation = talk(url, "ab", f"/save {file}", f"/save {tmp_path}/no/where", "/exit")
    assert json.loads(file.read_text()) == conversation.messages
    assert f"written to {file}" in shown and "cannot write" in shown


def test_a_refusal_is_shown_and_the_question_taken_back(url):
    shown, conversation = talk(url, "A" * 100, KeyboardInterrupt(), "ab")
    assert "context holds 64" in shown and "Ctrl-D or /exit leaves" in shown
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_ctrl_c_stops_an_answer_and_not_the_program(server, url):
    interrupt = threading.Timer(0.12, os.kill, (os.getpid(), signal.SIGINT))

    def begin() -> str:
        interrupt.start()
        return "abcdefghijklmnopqrstuvwxyzabcd"

    lines = [begin, lambda: "/exit"]
    shown = []
    with Client(url) as client:
        conversation = Conversation(client, GREEDY, None)
        converse(conversation, lambda: lines.pop(0)(), shown.append)
    assert "(stopped)" in "".join(shown)
    said = conversation.messages[-1]
    assert said["role"] == "assistant" and 0 < len(said["content"]) < 30
    assert "it was stopped" in str(conversation.stats)
    assert server.becomes(server.is_idle)


def test_a_pipe_gets_one_answer_and_nothing_else(url, server, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\ncd\n"))
    assert main(["chat", "--url", url, "--temperature", "0", "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == server.chat("ab\ncd", max_tokens=12).text() + "\n"


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("", [], "no question"),
        ("hello", ["--config", "a.toml"], "--config=a.toml is for a server that is started here"),
        ("hello", ["--store", "/s"], "--store=/s is for a server that is started here"),
        ("hello", ["--max-rows", "3"], "--max-rows=3 is for a server that is started here"),
        ("hello", ["--temperature", "-1"], "temperature is -1"),
        ("hello", ["other-model"], "not served here"),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_line(url, monkeypatch, capsys, text, flags, words):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["chat", "--url", url, *flags]) == 1
    said = capsys.readouterr()
    assert said.out == "" and words in said.err and said.err.count("\n") == 1


def test_a_server_of_its_own_is_told_what_serve_would_be(tmp_path):
    def told(*flags: str) -> list[str]:
        return serve_arguments(make_parser().parse_args(["chat", *flags]))

    settings = ["--dtype=bfloat16", "--max-rows=3", "--kv=int8", "--no-prefix-reuse"]
    arguments = told("--config=a.toml", "--store=/s", *settings)
    assert arguments == ["--config=a.toml", "--store=/s", *settings]
    serve = make_parser().parse_args(["serve", *arguments])
    assert (serve.max_rows, serve.dtype, serve.kv) == (3, "bfloat16", "int8")
    assert serve.prefix_reuse is False and serve.config == Path("a.toml")
    assert told("--config=a.toml") == ["--config=a.toml"], "the file says the rest, its store too"
    assert told("--prefix-reuse", "it") == ["--prefix-reuse", "it"]
    assert told() == [DEFAULT_MODEL]


def test_a_server_of_its_own_is_started_and_ended(tmp_path):
    sizes = ["--max-rows=1", "--token-budget=4", "--max-context=32", "--store", str(tmp_path)]
    with child_server([str(TINY / "llama-untied"), *sizes]) as url, Client(url) as client:
        (name,) = client.models()
        assert name == "llama-untied"
        assert client.complete([1, 2], max_tokens=2)["usage"]["completion_tokens"] == 2
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(str(tmp_path).encode() in command for command in commands), "it still runs"


def test_a_server_that_does_not_start_is_said(tmp_path, capfd):
    nowhere = child_server([str(tmp_path / "nowhere")])
    with pytest.raises(EngineStopped, match="lines above"), nowhere:
        pass
    assert "nowhere" in capfd.readouterr().err
