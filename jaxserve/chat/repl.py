"""Lines in, answers out: the loop of a chat, and the commands that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from jaxserve.chat.conversation import Conversation
from jaxserve.errors import JaxserveError

HELP = """/reset            forget what has been said
/system TEXT      begin anew with this system prompt; without TEXT show it
/save FILE        write the conversation as JSON
/stats            how quickly the last answer came
/exit             leave, as Ctrl-D does; Ctrl-C stops an answer"""

Read = Callable[[], str]
Write = Callable[[str], object]


def converse(conversation: Conversation, read: Read, write: Write) -> None:
    """Answer every line until there are no more.

    Args:
        read: the next line; EOFError at the end, KeyboardInterrupt if it was given up.
        write: shows text, with no line break of its own.
    """
    while True:
        try:
            line = read().strip()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\nCtrl-D or /exit leaves\n")
            continue
        if line in ("/exit", "/quit"):
            return
        if line.startswith("/"):
            write(obey(conversation, line) + "\n")
        elif line:
            show_answer(conversation, line, write)


def show_answer(conversation: Conversation, line: str, write: Write) -> None:
    """Ask, and write the answer as it comes; Ctrl-C ends the answer only."""
    answer = conversation.ask(line)
    try:
        for piece in answer:
            write(piece.reasoning + piece.text)
        write("\n")
    except KeyboardInterrupt:
        write("\n(stopped)\n")
    except JaxserveError as error:
        write(f"\n{error}\n")
    finally:
        answer.close()


def obey(conversation: Conversation, line: str) -> str:
    """Do what a command says; what there is to say about it."""
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    match command:
        case "/reset":
            conversation.reset(conversation.system)
            return "(begun anew)"
        case "/system" if argument:
            conversation.reset(argument)
            return "(begun anew)"
        case "/system":
            return conversation.system or "(there is none)"
        case "/save" if argument:
            return save(conversation, Path(argument).expanduser())
        case "/stats":
            return "(no answer yet)" if conversation.stats is None else str(conversation.stats)
        case _:
            return HELP


def save(conversation: Conversation, file: Path) -> str:
    """Write the messages as JSON."""
    try:
        file.write_text(json.dumps(conversation.messages, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        return f"cannot write {file}: {error.strerror}"
    return f"(written to {file})"
