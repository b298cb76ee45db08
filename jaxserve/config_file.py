"""Settings in a TOML file: one `flag = value` a line, read as defaults of a command's flags."""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError

NOT_SETTINGS = ("help", "config")


def use_config_file(command: argparse.ArgumentParser, file: Path) -> None:
    """Make what a file says the defaults of a command: flags that are given still win.

    Raises:
        ConfigError: the file cannot be read, names a flag that is not there, or gives one a value
            it does not take.
    """
    actions = {name: action for _, name, action in settings_of(command)}
    for name, given in read_toml(file).items():
        if isinstance(given, dict):
            raise ConfigError(f"{file}: [{name}] is a table: write each flag on a line of its own")
        if name not in actions:
            near = difflib.get_close_matches(name, actions, 1, 0.0)[0]
            raise ConfigError(f"{file}: there is no setting {name!r}: did you mean {near!r}?")
        try:
            value = from_toml(actions[name], given)
        except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
            raise ConfigError(f"{file}: {name} is {written(given)}: {error}") from error
        command.set_defaults(**{actions[name].dest: value})


def effective_config(command: argparse.ArgumentParser, flags: argparse.Namespace) -> str:
    """What a command was told, as a file that tells it the same. What is unset is a comment."""
    lines: list[str] = []
    title = ""
    for group, name, action in settings_of(command):
        if group != title:
            title = group
            lines += ["", f"# {title}"]
        value = getattr(flags, action.dest)
        if action.nargs == 0:
            value = value == action.const
        unset = value is None or value == ()
        lines.append(f"# {name} is unset" if unset else f"{name} = {written(value)}")
    return "\n".join(lines) + "\n"


def settings_of(
    command: argparse.ArgumentParser,
) -> Iterator[tuple[str, str, argparse.Action]]:
    """(title of its group, name in a file, action) of each flag and argument of a command.

    argparse shows its actions nowhere else; its own two groups count as having no title.
    """
    for number, group in enumerate(command._action_groups):
        for action in group._group_actions:
            name = (action.option_strings or [action.dest])[0].removeprefix("--")
            if action.dest not in NOT_SETTINGS:
                yield str(group.title) if number >= 2 else "", name, action


def read_toml(file: Path) -> dict[str, Any]:
    """ConfigError if the file cannot be read or is not TOML."""
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def from_toml(action: argparse.Action, given: Any) -> Any:
    """The value the flag would have had.

    Raises:
        ArgumentTypeError, ValueError or TypeError: it says what would be right.
    """
    if action.nargs == 0:
        if not isinstance(given, bool):
            raise TypeError("it must be true or false")
        return action.const if given else not action.const
    if isinstance(given, list) and given and all(isinstance(item, str) for item in given):
        text = ",".join(given)
    elif isinstance(given, str | int | float) and not isinstance(given, bool):
        text = str(given)
    else:
        raise TypeError("it must be a number or a string, as on the command line")
    convert = action.type if callable(action.type) else str
    value = convert(text)
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"it must be one of {', '.join(map(str, action.choices))}")
    is_number = isinstance(value, int | float)
    if is_number != isinstance(given, int | float):
        raise TypeError("it must be a number" if is_number else "it must be a string, in quotes")
    if isinstance(given, list) and not isinstance(value, tuple):
        raise TypeError("it must be one string, not a list")
    return value


def written(value: Any) -> str:
    """A value as TOML. Its strings are JSON's, and so are its numbers here: all are finite."""
    return json.dumps(value, ensure_ascii=False, default=str)
