"""`jaxserve chat`: from flags to a conversation, on a terminal or through a pipe."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack, suppress

from checkpoints import DEFAULT_MODEL
from jaxserve.chat.conversation import Conversation
from jaxserve.chat.repl import HELP, converse
from jaxserve.child import child_server
from jaxserve.client.synchronous import Client
from jaxserve.errors import ConfigError, RequestError
from jaxserve.flags.engine import ENGINE
from jaxserve.flags.settings import arguments_of

SAMPLING = ("max_tokens", "temperature", "top_p", "seed")


def run_chat(flags: argparse.Namespace) -> int:
    """Converse until the input ends. What comes through a pipe is one question."""
    if flags.url is not None and (own := own_server_flags(flags)):
        raise ConfigError(f"{own[0]} is for a server that is started here: leave out --url or it")
    with ExitStack() as stack:
        url = flags.url or stack.enter_context(child_server(serve_arguments(flags)))
        key = flags.api_key or os.environ.get("JAXSERVE_API_KEY")
        model = None if flags.url is None else flags.model
        client = stack.enter_context(Client(url, api_key=key, model=model))
        if flags.url is not None and model is None:
            model = client.first_model()  # other servers than this one want to be told
        given = {name: getattr(flags, name) for name in SAMPLING} | {"model": model}
        parameters = {name: value for name, value in given.items() if value is not None}
        conversation = Conversation(client, parameters, flags.system)
        if sys.stdin.isatty():
            talk(conversation)
        else:
            answer_pipe(conversation)
    return 0


def serve_arguments(flags: argparse.Namespace) -> list[str]:
    """What the server of our own is told."""
    arguments = own_server_flags(flags)
    if flags.model is not None or flags.serve_config is None:
        arguments.append(flags.model or DEFAULT_MODEL)
    return arguments


def own_server_flags(flags: argparse.Namespace) -> list[str]:
    """The flags that only a server of our own can be told."""
    own = {"--config": flags.serve_config, "--store": flags.store}
    given = [f"{flag}={value}" for flag, value in own.items() if value is not None]
    return given + arguments_of(flags, ENGINE)


def talk(conversation: Conversation) -> None:
    """On a terminal: lines can be edited, and come back with the arrow keys."""
    with suppress(ImportError):
        import readline  # noqa: F401  # input() uses it once it is there
    print(HELP + "\n")
    converse(conversation, lambda: input("> "), write)


def answer_pipe(conversation: Conversation) -> None:
    """One question, one answer, and nothing else."""
    question = sys.stdin.read().strip()
    if not question:
        raise RequestError("there is no question on stdin")
    for piece in conversation.ask(question):
        write(piece.text)
    write("\n")


def write(text: str) -> None:
    print(text, end="", flush=True)
