"""What the HTTP side can be told, and who may ask it."""

from __future__ import annotations

from pathlib import Path

from jaxserve.config import ServerConfig
from jaxserve.flags.settings import Parser, Setting, add_settings
from jaxserve.flags.types import origins, port, positive, seconds

HTTP = (
    Setting("--host", str, "address to listen on"),
    Setting("--port", port, "0 picks a free one"),
    Setting("--uds", Path, "a Unix socket to listen on, not host and port", "PATH"),
    Setting("--ssl-certfile", Path, "speak TLS: certificate", "FILE"),
    Setting("--ssl-keyfile", Path, "its key; unset: in the same file", "FILE"),
    Setting("--served-model-name", str, "the model id clients use", "NAME"),
    Setting(
        "--drain-timeout",
        seconds,
        "time running requests get to finish after SIGTERM",
        "SECONDS",
    ),
    Setting("--max-pending", positive, "most sequences accepted and unfinished; more get 429", "N"),
    Setting("--max-body-bytes", positive, "larger request bodies get 413", "N"),
    Setting(
        "--heartbeat-timeout",
        seconds,
        "silence after which the engine counts as hanging and is restarted",
        "SECONDS",
    ),
    Setting(
        "--pooling",
        ("last", "mean"),
        "what an embedding is made of: the last token's hidden state, or the mean of all",
    ),
    Setting(
        "--batch-dir",
        Path,
        "folder of uploaded files and batches; unset: one for each model in the store",
        "DIR",
    ),
    Setting("--batch-concurrency", positive, "most lines of batches at work at once", "N"),
    Setting("--shared-cache", None, "requests of different API keys share computed prompts too"),
    Setting(
        "--tool-parser",
        ("auto", "hermes", "llama3", "mistral", "none"),
        "how the model writes calls of functions; auto: as its chat template shows it",
    ),
    Setting(
        "--reasoning-parser",
        ("auto", "think", "none"),
        "think: answers begin with <think>...</think>, which clients get as reasoning; auto: "
        "if the chat template says so",
    ),
    Setting("--access-log", None, "log a line of JSON a request"),
)
ACCESS = (
    Setting(
        "--api-key-file",
        Path,
        "lines of 'name: key', read again on SIGHUP; a key in the environment's "
        "JAXSERVE_API_KEY counts too; unset: everybody may ask",
        "FILE",
    ),
    Setting("--metrics-need-key", None, "/metrics is not open to all, as /health and /version are"),
    Setting("--requests-per-minute", positive, "most of each API key", "N"),
    Setting(
        "--tokens-per-minute", positive, "most of each API key, prompts and output together", "N"
    ),
    Setting(
        "--allow-origin",
        origins,
        "web pages that may ask from a browser, such as https://chat.example.org; *: any",
        "ORIGIN,ORIGIN,...",
    ),
)


def add_server(serve: Parser) -> None:
    add_settings(serve.add_argument_group("HTTP"), ServerConfig, HTTP)
    access = serve.add_argument_group("who may ask, and how much")
    add_settings(access, ServerConfig, ACCESS)
