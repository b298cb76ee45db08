"""What the README tells a new user to type does what it says."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from live import LiveServer

from jaxserve.cli import make_parser
from jaxserve.server.neutral import NEUTRAL
from jaxserve.server.openai import ChatBody, CompletionBody, StreamOptions

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_ci_runs_exactly_the_readmes_test_command():
    (command,) = [
        block.strip()
        for block in blocks("bash")
        if block.strip().endswith("/pytest") and "[test]" in block
    ]
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_curl_streams_a_sensible_answer(live: LiveServer):
    (command,) = [block for block in blocks("bash") if block.startswith("curl")]
    done = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, live.url)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    events = [line[6:] for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    text = "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events)
    assert "Paris" in text


@pytest.mark.parametrize("client", ["openai", "jaxserve"])
def test_a_clients_python_snippet_prints_a_sensible_answer(client, live: LiveServer):
    (snippet,) = [
        block
        for block in blocks("python")
        if ADDRESS in block and block.split()[1].startswith(client)
    ]
    done = subprocess.run(
        [sys.executable, "-c", snippet.replace(ADDRESS, live.url)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Paris" in done.stdout


def test_every_python_snippet_imports_what_there_is():
    for snippet in blocks("python"):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize(
    "line",
    [
        line.split("jaxserve ", 1)[1].split(" > ")[0]
        for block in blocks("bash")
        for line in block.splitlines()
        if line.startswith(".venv/bin/jaxserve")
    ],
)
def test_every_jaxserve_command_parses(line):
    make_parser().parse_args(shlex.split(line))


def test_every_file_the_readme_names_exists():
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", README))
    assert len(named) > 15
    for name in named:
        assert (ROOT / "jaxserve" / name).exists() or (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


def test_every_file_the_tests_own_readme_names_exists():
    named = re.findall(r"`(\w+\.py)`", (ROOT / "tests" / "README.md").read_text())
    assert "test_scheduler.py" in named
    for name in named:
        assert (ROOT / "tests" / name).exists(), name


def test_the_table_has_every_parameter_and_says_where_it_is_honoured():
    rows = re.findall(r"^\| (`.*?`) \| ([CM ]+) \|", README, re.MULTILINE)
    where = {name: of for names, of in rows for name in re.findall(r"`(\w+)`", names)}
    completion, chat = set(CompletionBody.__struct_fields__), set(ChatBody.__struct_fields__)
    assert where.keys() == completion | chat
    for name, of in where.items():
        assert of.split() == ["C"] * (name in completion) + ["M"] * (name in chat), name
    options = next(line for line in README.splitlines() if line.startswith("| `stream_options`"))
    assert all(f"`{name}`" in options for name in StreamOptions.__struct_fields__)


def test_the_readme_names_every_parameter_that_may_ask_for_nothing_only():
    (named,) = re.findall(r"may ask for nothing only: (.*?)\. Whatever", README, re.DOTALL)
    one_endpoint_only = set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__)
    assert set(re.findall(r"`(\w+)`", named)) == NEUTRAL.keys() - one_endpoint_only
