"""What the README tells a new user to type does what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from live import LiveServer

from jaxserve.cli import make_parser

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


def test_the_python_snippet_prints_a_sensible_answer(live: LiveServer):
    (snippet,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", snippet.replace(ADDRESS, live.url)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Paris" in done.stdout


@pytest.mark.parametrize(
    "line",
    [
        line.split("jaxserve ", 1)[1]
        for block in blocks("bash")
        for line in block.splitlines()
        if line.startswith(".venv/bin/jaxserve")
    ],
)
def test_every_jaxserve_command_parses(line):
    make_parser().parse_args(line.split())


def test_every_file_the_readme_names_exists():
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", README))
    assert len(named) > 15
    for name in named:
        assert (ROOT / "jaxserve" / name).exists() or (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
