"""Flags to frozen settings to wiring. Nothing else reads flags; nothing here decides."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoints import (
    CATALOGUE,
    DEFAULT_MODEL,
    CheckpointError,
    Store,
    default_store_path,
    list_models,
    open_checkpoint,
)
from jaxserve.config import EngineConfig, ServerConfig, encode_engine_config
from jaxserve.errors import JaxserveError
from jaxserve.frames import Progress
from jaxserve.terminal import ProgressBar

Commands = argparse._SubParsersAction  # argparse has no public name for what add_subparsers gives


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code; errors are one line on stderr."""
    flags = make_parser().parse_args(argv)
    try:
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
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_pull(commands)
    _add_models(commands)
    return parser


def _add_command(
    commands: Commands[argparse.ArgumentParser], name: str, help: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=help,
        description=help,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument(
        "--store",
        type=Path,
        default=default_store_path(),
        help="folder of converted models and compiled steps",
    )
    return command


def _add_serve(commands: Commands[argparse.ArgumentParser]) -> None:
    serve = _add_command(commands, "serve", "serve a model over an OpenAI-compatible HTTP API")
    serve.set_defaults(run=run_serve)
    serve.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name, path or hf:org/name")
    http = serve.add_argument_group("HTTP")
    http.add_argument("--host", default=default(ServerConfig, "host"), help="address to listen on")
    http.add_argument(
        "--port", type=port, default=default(ServerConfig, "port"), help="0 picks a free one"
    )
    http.add_argument("--served-model-name", metavar="NAME", help="the model id clients use")
    http.add_argument(
        "--drain-timeout",
        type=seconds,
        metavar="SECONDS",
        default=default(ServerConfig, "drain_timeout"),
        help="time running requests get to finish after SIGTERM",
    )
    http.add_argument(
        "--max-pending",
        type=positive,
        metavar="N",
        default=default(ServerConfig, "max_pending"),
        help="most sequences accepted and unfinished; more get 429",
    )
    http.add_argument(
        "--max-body-bytes",
        type=positive,
        metavar="N",
        default=default(ServerConfig, "max_body_bytes"),
        help="larger request bodies get 413",
    )
    http.add_argument(
        "--heartbeat-timeout",
        type=seconds,
        metavar="SECONDS",
        default=default(ServerConfig, "heartbeat_timeout"),
        help="silence after which the engine counts as hanging and is restarted",
    )
    http.add_argument("--access-log", action="store_true", help="log one line a request")
    _add_engine(serve)


def _add_engine(serve: argparse.ArgumentParser) -> None:
    engine = serve.add_argument_group("engine")
    engine.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and cache; unset: float32 on CPU, bfloat16 on GPU",
    )
    engine.add_argument(
        "--max-rows",
        type=positive,
        metavar="R",
        default=default(EngineConfig, "max_rows"),
        help="most sequences running at once",
    )
    engine.add_argument(
        "--token-budget",
        type=positive,
        metavar="T",
        default=default(EngineConfig, "token_budget"),
        help="most tokens in a step, prefill and decode together",
    )
    engine.add_argument(
        "--max-context",
        type=positive,
        metavar="TOKENS",
        help="most tokens of a sequence, prompt and output; unset: the model's own limit",
    )
    engine.add_argument(
        "--page-size",
        type=positive,
        metavar="B",
        default=default(EngineConfig, "page_size"),
        help="tokens per cache page",
    )
    engine.add_argument(
        "--num-pages", type=positive, metavar="N", help="pages of cache; unset: what memory allows"
    )
    engine.add_argument(
        "--memory-fraction",
        type=fraction,
        metavar="F",
        help="share of memory to use; unset: 0.9 of a GPU, 0.1 of a CPU machine for the cache",
    )
    engine.add_argument(
        "--step", metavar="MODULE:FACTORY", help="a step function of your own; see examples/"
    )


def _add_pull(commands: Commands[argparse.ArgumentParser]) -> None:
    pull = _add_command(commands, "pull", "fetch or convert a model into the store")
    pull.set_defaults(run=run_pull)
    pull.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name, path or hf:org/name")


def _add_models(commands: Commands[argparse.ArgumentParser]) -> None:
    models = _add_command(commands, "models", "list the models known and the models pulled")
    models.set_defaults(run=run_models)


def run_serve(flags: argparse.Namespace) -> int:
    # Imported here: `jaxserve pull` needs no server, and the server's process no jax.
    from jaxserve.server.app import make_app
    from jaxserve.server.run import run
    from jaxserve.tokenizer import Tokenizer

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if flags.access_log:
        logging.getLogger("jaxserve.access").setLevel(logging.INFO)
    engine: EngineConfig = settings(EngineConfig, flags)
    server: ServerConfig = settings(ServerConfig, flags)
    ensure_pulled(engine.model, engine.store)
    checkpoint = open_checkpoint(engine.model, Store(engine.store))
    spec = checkpoint.tokenizer
    app = make_app(
        server,
        model_name=server.served_model_name or checkpoint.name,
        model=checkpoint.config,
        tokenizer=None
        if spec is None
        else Tokenizer(spec, vocab_size=checkpoint.config.vocab_size),
        worker_argv=worker_argv(engine),
    )
    with ProgressBar() as progress:

        def show(frame: Progress) -> None:
            progress.update(frame.message, frame.done, frame.total)

        def ready(line: str) -> None:
            progress.stop()
            print(line, flush=True)

        return run(app, server, on_progress=show, on_ready=ready)


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


def ensure_pulled(model: str, store: Path) -> None:
    """Fetch a catalogue model on first use, in a process of its own: converting needs jax."""
    if model not in CATALOGUE or Store(store).holds(model):
        return
    command = [sys.executable, "-m", "jaxserve", "pull", model, "--store", str(store)]
    if subprocess.run(command, check=False).returncode != 0:
        raise CheckpointError(f"could not pull {model}", remedy="The lines above say why.")


def worker_argv(config: EngineConfig) -> list[str]:
    """The command line of an engine process, but for `--socket PATH`."""
    return [sys.executable, "-m", "jaxserve.worker", "--config", encode_engine_config(config)]


def settings(kind: type[Any], flags: argparse.Namespace) -> Any:
    """A frozen config of the flags that bear the names of its fields."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in vars(flags).items() if name in names})


def default(kind: type[Any], name: str) -> Any:
    """The default a config declares for a field: it is written down once, there."""
    return next(field.default for field in dataclasses.fields(kind) if field.name == name)


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def port(text: str) -> int:
    """A TCP port; 0 asks for a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def seconds(text: str) -> float:
    """A finite number of seconds, not negative."""
    return _number(text, "a number of seconds, 0 or more", 0.0, math.inf)


def fraction(text: str) -> float:
    """A share above 0 and up to 1."""
    return _number(text, "a share between 0 and 1", 1e-6, 1.0)


def _number(text: str, expected: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (low <= value <= high and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value
