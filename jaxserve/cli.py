"""Flags to frozen settings to wiring. Nothing else reads flags; nothing here decides."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from checkpoints import (
    CheckpointError,
    Store,
    list_models,
    open_checkpoint,
)
from jaxserve.bench.flags import add_bench
from jaxserve.chat.flags import add_chat
from jaxserve.config import EngineConfig, ServerConfig, encode_engine_config
from jaxserve.config_file import effective_config, use_config_file
from jaxserve.errors import JaxserveError
from jaxserve.fetch import ensure_pulled
from jaxserve.flags.engine import add_engine
from jaxserve.flags.model import add_model, add_store
from jaxserve.flags.server import add_server
from jaxserve.flags.settings import add_config, config_of
from jaxserve.frames import Progress
from jaxserve.offline.flags import add_generate
from jaxserve.study_commands import run_compile, run_plan, run_simulate
from jaxserve.study_flags import add_compile, add_plan, add_simulate
from jaxserve.terminal import ProgressBar


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Says what a flag is unless it is given, where there is something to say."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, bool) or action.default in (None, ()):
            return action.help
        return super()._get_help_string(action)


Commands = argparse._SubParsersAction  # argparse has no public name for what add_subparsers gives


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code; errors are one line on stderr."""
    parser = make_parser()
    flags = parser.parse_args(argv)
    try:
        if getattr(flags, "config", None) is not None:
            use_config_file(flags.command, flags.config)
            flags = parser.parse_args(argv)
        return int(flags.run(flags))
    except (JaxserveError, CheckpointError) as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxserve: interrupted", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxserve",
        description="An LLM serving engine in JAX.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = _add_command(
        commands, "serve", "serve a model over an OpenAI-compatible HTTP API", run_serve
    )
    _add_serving(serve)
    _add_serving(
        _add_command(commands, "config", "what serve would be told, as a file for it", run_config)
    )
    add_generate(
        _add_command(commands, "generate", "answer a file of prompts, without a server", generate)
    )
    add_chat(_add_command(commands, "chat", "converse with a model on the terminal", chat))
    _add_benchmarks(commands)
    add_model(_add_command(commands, "pull", "fetch or convert a model into the store", run_pull))
    _add_command(commands, "models", "list the models known and the models pulled", run_models)
    add_plan(_add_command(commands, "plan", "what a card can serve, and how fast", run_plan))
    add_simulate(
        _add_command(
            commands, "simulate", "ways to schedule, compared on a simulated card", run_simulate
        )
    )
    add_compile(
        _add_command(
            commands, "compile", "compile the step for a card that is not here", run_compile
        )
    )
    return parser


def _add_serving(command: argparse.ArgumentParser) -> None:
    add_config(command)
    add_model(command)
    add_server(command)
    add_engine(command)


def _add_benchmarks(commands: Commands[argparse.ArgumentParser]) -> None:
    text = "how fast a server is under a load, or the engine alone"
    benchmarks = commands.add_parser("bench", help=text, description=text).add_subparsers(
        required=True, metavar="BENCHMARK"
    )

    def make(name: str, help: str) -> argparse.ArgumentParser:
        command = benchmarks.add_parser(name, help=help, description=help, formatter_class=Help)
        command.set_defaults(run=partial(bench, name), command=command)
        return command

    add_bench(make)


def _add_command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    help: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=help,
        description=help,
        formatter_class=Help,
    )
    add_store(command)
    command.set_defaults(run=run, command=command)
    return command


def run_serve(flags: argparse.Namespace) -> int:
    # Imported here: `jaxserve pull` needs no server, and the server's process no jax.
    from jaxserve.server.app import make_app
    from jaxserve.server.keys import Keys
    from jaxserve.server.run import run
    from jaxserve.tokenizer import Tokenizer

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if flags.access_log:
        logging.getLogger("jaxserve.access").setLevel(logging.INFO)
    engine: EngineConfig = config_of(EngineConfig, flags)
    server: ServerConfig = config_of(ServerConfig, flags)
    ensure_pulled(engine.model, engine.store)
    checkpoint = open_checkpoint(engine.model, Store(engine.store))
    spec = checkpoint.tokenizer
    keys = Keys(flags.api_key_file, os.environ.get("JAXSERVE_API_KEY"))
    model_name = server.served_model_name or checkpoint.name
    if server.batch_dir is None:
        folder = engine.store / "batches" / model_name.replace("/", "--")
        server = dataclasses.replace(server, batch_dir=folder)
    app = make_app(
        server,
        model_name=model_name,
        model=checkpoint.config,
        tokenizer=None
        if spec is None
        else Tokenizer(spec, vocab_size=checkpoint.config.vocab_size),
        worker_argv=worker_argv(engine),
        keys=keys,
    )
    with ProgressBar() as progress:

        def show(frame: Progress) -> None:
            progress.update(frame.message, frame.done, frame.total)

        def ready(line: str) -> None:
            progress.stop()
            print(line, flush=True)

        return run(app, server, on_progress=show, on_ready=ready)


def run_config(flags: argparse.Namespace) -> int:
    print(effective_config(flags.command, flags), end="")
    return 0


def bench(name: str, flags: argparse.Namespace) -> int:
    # Measuring a server takes no engine, and so no jax.
    alone = name in ("latency", "throughput")
    module = importlib.import_module(f"jaxserve.bench.{'engine_command' if alone else 'command'}")
    return int(getattr(module, f"run_{name}")(flags))


def chat(flags: argparse.Namespace) -> int:
    from jaxserve.chat.command import run_chat

    return run_chat(flags)


def generate(flags: argparse.Namespace) -> int:
    from jaxserve.offline.command import run_generate

    return run_generate(flags)


def run_pull(flags: argparse.Namespace) -> int:
    import jax

    from checkpoints import pull

    # Converting is work for the host: a GPU's memory stays for whoever is serving on it.
    jax.config.update("jax_platforms", "cpu")
    with ProgressBar() as progress:
        folder = pull(flags.model, Store(flags.store), progress=progress.update)
    print(f"{flags.model} is ready in {folder}")
    return 0


def run_models(flags: argparse.Namespace) -> int:
    table = Table("model", "state", "size", "licence", "description")
    for model in list_models(Store(flags.store)):
        state = "pulled" if model.is_pulled else "known"
        table.add_row(
            model.name, state, f"{model.size / 1e6:,.0f} MB", model.licence, model.description
        )
    Console().print(table)
    return 0


def worker_argv(config: EngineConfig) -> list[str]:
    """The command line of an engine process, but for `--socket PATH`."""
    return [sys.executable, "-m", "jaxserve.worker", "--config", encode_engine_config(config)]
