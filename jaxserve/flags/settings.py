"""Flags that are fields of a config: their defaults are the config's own."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Parser = argparse.ArgumentParser
Container = argparse._ActionsContainer  # a parser, or a group of one: argparse names it only so


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag.

    Attributes:
        flag: with its dashes. help: of it.
        takes: what reads its text, or the texts it may be; None: it is a switch.
        metavar: what its help calls the text.
        field: of the config; "" is the flag's name.
    """

    flag: str
    takes: Callable[[str], Any] | tuple[str, ...] | None
    help: str
    metavar: str | None = None
    field: str = ""

    @property
    def dest(self) -> str:
        return self.field or self.flag.removeprefix("--").replace("-", "_")


class Switch(argparse.Action):
    """A flag without a value, and its opposite, which undoes what a file says.

    `const` is what the flag means.
    """

    def __init__(
        self, option_strings: Sequence[str], dest: str, default: object, help: str | None
    ) -> None:
        both = [*option_strings, *map(opposite, option_strings)]
        const = not default if isinstance(default, bool) else True
        super().__init__(both, dest, nargs=0, const=const, default=default, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        is_flag = option_string == self.option_strings[0]
        setattr(namespace, self.dest, self.const if is_flag else not self.const)


def opposite(flag: str) -> str:
    """`--no-x` of `--x`, and `--x` of `--no-x`."""
    bare = flag.removeprefix("--no-")
    return "--" + bare if bare != flag else "--no-" + flag.removeprefix("--")


def add_settings(container: Container, kind: type[Any] | None, settings: Iterable[Setting]) -> None:
    """Flags for the fields of a config. What is no field of it is unset, or off, by default.

    Without a config all are unset by default, for whom `arguments_of` hands them on to.
    """
    fields = () if kind is None else dataclasses.fields(kind)
    defaults = {field.name: field.default for field in fields}
    for setting in settings:
        off = False if setting.takes is None and kind is not None else None
        default = defaults.get(setting.dest, off)
        how: dict[str, Any] = {"dest": setting.dest, "default": default, "help": setting.help}
        if setting.takes is None:
            how["action"] = Switch
        elif isinstance(setting.takes, tuple):
            how["choices"] = setting.takes
        else:
            how |= {"type": setting.takes, "metavar": setting.metavar}
        container.add_argument(setting.flag, **how)


def arguments_of(flags: argparse.Namespace, settings: Iterable[Setting]) -> list[str]:
    """What was given of these, as another command is told it."""
    given = []
    for setting in settings:
        value = getattr(flags, setting.dest)
        if value is None:
            continue
        if setting.takes is None:
            given.append(setting.flag if value else opposite(setting.flag))
        else:
            given.append(f"{setting.flag}={value}")
    return given


def add_config(command: Parser) -> None:
    command.add_argument(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="defaults for the flags below, a line 'flag = value' each",
    )


def default(kind: type[Any], name: str) -> Any:
    """The default a config declares for a field: it is written down once, there."""
    return next(field.default for field in dataclasses.fields(kind) if field.name == name)


def config_of(kind: type[Any], flags: argparse.Namespace) -> Any:
    """A frozen config of the flags that bear the names of its fields."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in vars(flags).items() if name in names})
