"""Which model, and where models are kept."""

from __future__ import annotations

from pathlib import Path

from checkpoints import DEFAULT_MODEL, default_store_path
from jaxserve.flags.settings import Parser


def add_store(command: Parser) -> None:
    command.add_argument(
        "--store",
        type=Path,
        default=default_store_path(),
        help="folder of converted models and compiled steps",
    )


def add_model(command: Parser) -> None:
    command.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help="name, path or hf:org/name"
    )
