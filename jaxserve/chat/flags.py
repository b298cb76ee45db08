"""What `jaxserve chat` can be told."""

from __future__ import annotations

from pathlib import Path

from jaxserve.flags.engine import ENGINE
from jaxserve.flags.settings import Parser, add_settings
from jaxserve.flags.types import positive


def add_url(command: Parser, *, required: bool = False) -> None:
    """Where a server is, and the key it wants."""
    command.add_argument(
        "--url", required=required, help="of a server's root, such as http://127.0.0.1:8000"
    )
    command.add_argument(
        "--api-key", metavar="KEY", help="for it; unset: the environment's JAXSERVE_API_KEY"
    )


def add_chat(command: Parser) -> None:
    command.add_argument(
        "model",
        nargs="?",
        help="name, path or hf:org/name: a server is started for it and ended in the end; with "
        "--url what that server calls it; unset: smollm2-135m-instruct, or what is served",
    )
    add_url(command)
    command.add_argument(
        "--config", dest="serve_config", type=Path, metavar="FILE.toml", help="of that server"
    )
    command.add_argument("--system", metavar="TEXT", help="the system prompt")
    command.add_argument("--max-tokens", type=positive, metavar="N", help="of an answer")
    command.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    command.add_argument("--top-p", type=float, metavar="P", help="0 to 1")
    command.add_argument("--seed", type=int, metavar="N", help="of every answer")
    command.set_defaults(store=None)  # a store that a file names is not overruled unasked
    engine = command.add_argument_group("engine of a server that is started; as serve has them")
    add_settings(engine, None, ENGINE)
