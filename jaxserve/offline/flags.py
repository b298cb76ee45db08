"""What `jaxserve generate` can be told."""

from __future__ import annotations

from pathlib import Path

from jaxserve.flags.engine import add_engine
from jaxserve.flags.model import add_model
from jaxserve.flags.settings import Parser
from jaxserve.flags.types import positive


def add_generate(command: Parser) -> None:
    add_model(command)
    command.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="prompts: .jsonl has bodies of the API, with an id if they like; other files have a "
        "prompt a line; - is stdin",
    )
    command.add_argument(
        "--output",
        type=Path,
        default="-",
        metavar="FILE.jsonl",
        help="answers, a JSON object a line; what is there already is not asked again; - is stdout",
    )
    command.add_argument(
        "--format", choices=("auto", "jsonl", "txt"), default="auto", help="of the input"
    )
    command.add_argument(
        "--overwrite", action="store_true", help="forget what is in the output already"
    )
    command.add_argument(
        "--chat", action="store_true", help="prompts are what a user says, not texts to continue"
    )
    defaults = command.add_argument_group("for prompts that do not say otherwise")
    defaults.add_argument("--system", metavar="TEXT", help="with --chat: the system prompt")
    defaults.add_argument("--max-tokens", type=positive, metavar="N", help="of an answer")
    defaults.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    defaults.add_argument("--top-p", type=float, metavar="P", help="0 to 1")
    defaults.add_argument("--seed", type=int, metavar="N", help="unset: a fresh one for each")
    defaults.add_argument("--stop", action="append", metavar="TEXT", help="ends an answer")
    add_offline_engine(command)


def add_offline_engine(command: Parser) -> None:
    """The engine's flags. It promises nothing unless they say so: see `engine_options`."""
    add_engine(command)
    command.set_defaults(no_promise=None)
