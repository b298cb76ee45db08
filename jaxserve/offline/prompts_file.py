"""Files of prompts in, files of answers out; an output that was broken off is gone on with."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from jaxserve.errors import ConfigError

STANDARD = Path("-")


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt of an input.

    Attributes:
        index: its place, from 0; empty lines have none.
        body: what it asks for, as a body of the API.
        name: what the line calls itself, if it says.
        mark: of what is asked and how, to recognise its answer by.
    """

    index: int
    body: dict[str, Any]
    name: str | None
    mark: str


def read_prompts(file: Path, kind: str, defaults: Mapping[str, Any], chat: bool) -> list[Line]:
    """The prompts of a file, or of stdin.

    Args:
        file: "-" is stdin.
        kind: "jsonl" has bodies of the API, with an `id` if they like; "txt" a prompt a line;
            "auto" is what the name says, and txt for other names.
        defaults: fields of bodies that do not have them.
        chat: prompts that are plain text are what a user says.

    Raises:
        ConfigError: the file cannot be read, or a line is not what `kind` says.
    """
    try:
        text = sys.stdin.read() if file == STANDARD else file.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text") from error
    bodies = file.suffix == ".jsonl" if kind == "auto" else kind == "jsonl"
    lines: list[Line] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        asked = json_line(line, f"{file}, line {number}") if bodies else {"prompt": line}
        name = asked.pop("id", None)
        body = with_defaults(asked, defaults, chat)
        lines.append(Line(len(lines), body, name, mark_of(body)))
    if not lines:
        raise ConfigError(f"{file} has no prompts")
    return lines


def json_line(line: str, where: str) -> dict[str, Any]:
    """ConfigError unless it is a JSON object."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f'{where} is not a JSON object such as {{"prompt": "Once"}}')
    return found


def with_defaults(asked: dict[str, Any], defaults: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """A whole body. A system prompt goes before the messages, where they have none."""
    system = [{"role": "system", "content": defaults["system"]}] if "system" in defaults else []
    body = {name: value for name, value in defaults.items() if name != "system"} | asked
    if chat and isinstance(body.get("prompt"), str):
        body["messages"] = [*system, {"role": "user", "content": body.pop("prompt")}]
    return body


def mark_of(body: Mapping[str, Any]) -> str:
    """The same for the same request only."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def answers_file(file: Path, lines: Sequence[Line], *, overwrite: bool) -> Iterator[AnswersFile]:
    """The file to write answers to, with those it has already. Sorted when the block has ended.

    Raises:
        ConfigError: it cannot be written, or has answers to something else.
    """
    if file == STANDARD:
        yield AnswersFile(sys.stdout, {})
        return
    try:
        done = {} if overwrite else read_answers(file, lines)
        rewrite(file, done)
        with file.open("a") as out:
            answers = AnswersFile(out, done)
            yield answers
        rewrite(file, answers.done)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class AnswersFile:
    """Answers as they come, one JSON object a line.

    Attributes:
        out: where to. done: the lines that are there, by the prompt's index.
    """

    out: TextIO
    done: dict[int, str]

    def write(self, line: Line, answer: Mapping[str, Any]) -> None:
        """Write it at once: what is there survives whatever happens next."""
        head: dict[str, Any] = {"index": line.index}
        if line.name is not None:
            head["id"] = line.name
        text = json.dumps({**head, **answer, "mark": line.mark}, ensure_ascii=False)
        self.done[line.index] = text
        self.out.write(text + "\n")
        self.out.flush()


def read_answers(file: Path, lines: Sequence[Line]) -> dict[int, str]:
    """The answers a file has, by index. Errors and a last line that was torn do not count.

    Raises:
        ConfigError: they are answers to other prompts, or to these asked in another way.
    """
    if not file.exists():
        return {}
    marks = {line.index: line.mark for line in lines}
    found: dict[int, str] = {}
    for text in file.read_text().splitlines():
        try:
            answer = json.loads(text)
            index, mark = answer["index"], answer["mark"]
        except (ValueError, TypeError, KeyError):
            index, mark, answer = None, "", {}
        if index is None and text.startswith('{"index"'):
            continue
        if marks.get(index) != mark:
            raise ConfigError(
                f"{file} has something else than answers to these prompts with these settings: "
                "choose another --output, or --overwrite it"
            )
        if "error" not in answer:
            found[index] = text
    return found


def rewrite(file: Path, answers: Mapping[int, str]) -> None:
    """Put exactly these into the file, in order, or leave it as it is."""
    beside = file.with_name(file.name + ".new")
    beside.write_text("".join(answers[index] + "\n" for index in sorted(answers)))
    os.replace(beside, file)
