"""`--config` and `jaxserve config`: a file says what the command line would have said."""

from __future__ import annotations

import argparse

import pytest

from jaxserve.cli import main, make_parser
from jaxserve.config_file import settings_of
from jaxserve.flags.types import origins

SAMPLES = ("0.5", "7", "https://a.example,http://b.example:80", "some words, 'quoted' \\ \u00e9")


def serve() -> argparse.ArgumentParser:
    return make_parser().parse_args(["serve"]).command


SETTINGS = [(name, action) for _, name, action in settings_of(serve())]


def sample(action: argparse.Action) -> list[str]:
    """What to say on a command line so that the setting is not its default."""
    if action.nargs == 0:
        return []
    if action.choices is not None:
        return [next(str(c) for c in reversed(list(action.choices)) if c != action.default)]
    if action.type is origins:
        return [SAMPLES[2]]
    for text in reversed(SAMPLES):
        try:
            if action.type is not None:
                action.type(text)
        except (argparse.ArgumentTypeError, ValueError):
            continue
        return [text]
    raise AssertionError(f"no sample for {action.option_strings}")


def effective(capsys, *argv: str) -> str:
    assert main(["config", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("name", "action"), SETTINGS, ids=[name for name, _ in SETTINGS])
def test_every_setting_survives_being_printed_and_read_back(name, action, capsys, tmp_path):
    argv = [*(["--" + name] if action.option_strings else []), *sample(action)]
    printed = effective(capsys, *argv)
    assert printed != effective(capsys), "the sample is the default"
    file = tmp_path / "serve.toml"
    file.write_text(printed)
    assert effective(capsys, "--config", str(file)) == printed
    command = make_parser().parse_args(["config", *argv])
    assert f"\n{name} = " in "\n" + printed and vars(command)[action.dest] != action.default


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(capsys, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('model = "gemma-3-270m"\nport = 9000\nmax-rows = 7\n')
    printed = effective(capsys, "--config", str(file), "--port", "9001")
    assert 'model = "gemma-3-270m"' in printed
    assert "port = 9001" in printed and "max-rows = 7" in printed
    assert 'model = "mine"' in effective(capsys, "mine", "--config", str(file))


SWITCHES = {name: action for name, action in SETTINGS if action.nargs == 0}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_a_file_throws_is_thrown_back_on_the_command_line(name, capsys, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(f"{name} = true\n")
    on, off = SWITCHES[name].option_strings
    assert on == "--" + name
    assert f"\n{name} = true\n" in effective(capsys, "--config", str(file))
    assert f"\n{name} = false\n" in effective(capsys, "--config", str(file), off)
    assert effective(capsys, off) == effective(capsys)
    assert effective(capsys, off, on) == effective(capsys, "--config", str(file))


def test_the_opposite_of_a_no_is_the_flag_without_it():
    assert {flag for action in SWITCHES.values() for flag in action.option_strings} >= {
        "--no-promise",
        "--promise",
        "--no-prefix-reuse",
        "--prefix-reuse",
        "--access-log",
        "--no-access-log",
    }


def test_a_list_may_be_written_as_one(capsys, tmp_path):
    file = tmp_path / "serve.toml"
    for value in ('["https://a.example", "*"]', '"https://a.example,*"'):
        file.write_text(f"allow-origin = {value}\n")
        printed = effective(capsys, "--config", str(file))
        assert 'allow-origin = ["https://a.example", "*"]' in printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-row = 3", "there is no setting 'max-row': did you mean 'max-rows'?"),
        ("max_rows = 3", "did you mean 'max-rows'?"),
        ("config = 'a.toml'", "there is no setting 'config'"),
        ("[engine]\nmax-rows = 3", "[engine] is a table"),
        ("max-rows = 'eight'", "max-rows is \"eight\": 'eight' is not a whole number from 1"),
        ("max-rows = '8'", 'max-rows is "8": it must be a number'),
        ("max-rows = 0", "max-rows is 0: '0' is not a whole number from 1"),
        ("max-rows = 1.5", "is not a whole number"),
        ("max-rows = true", "max-rows is true: it must be a number or a string"),
        ("max-rows = []", "max-rows is []: it must be a number or a string"),
        ("max-rows = 1979-05-27", 'max-rows is "1979-05-27": it must be a number or a string'),
        ("percentile = nan", "percentile is NaN"),
        ("host = 5", "host is 5: it must be a string, in quotes"),
        ("host = ['a', 'b']", "it must be one string, not a list"),
        ("access-log = 1", "access-log is 1: it must be true or false"),
        ("kv = 'int4'", 'kv is "int4": it must be one of auto, int8'),
        ("max-rows = ", "is not TOML"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_in_a_line(text, words, capsys, tmp_path):
    file = tmp_path / "serve.toml"
    if text is not None:
        file.write_text(text)
    assert main(["config", "--config", str(file)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert words in said.err and str(file) in said.err
