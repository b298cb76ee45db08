"""Settings, frozen once read. Only `cli.py` makes them from flags; everything else takes values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

USUAL_SIZES = {"cpu": (64, 256), "gpu": (256, 1024)}
"""Rows and tokens of a step, by platform. Behind a GPU's reading of the weights the arithmetic of
some hundred tokens is hidden; a CPU's never is."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the worker runs a model.

    Attributes:
        model: catalogue name, folder, .gguf file, Orbax checkpoint or `hf:org/name`.
        store: folder with converted checkpoints and JAX's compilation cache.
        dtype: of weights and activations; None is float32 on CPU, bfloat16 on GPU.
        weights: what matrices are kept in: "auto" is `dtype`; "int8" has a scale for each row.
        kv: what the cache keeps keys and values in: "auto" is `dtype`; "int8" has a scale for
            each head of each token besides.
        attention: "auto", or one of `models.attention.AttentionKind`.
        page_size: B, tokens per page.
        num_pages: N, the null page included; None sizes the pool from `memory_fraction`.
        memory_fraction: share of the device's memory for weights and pages together.
        max_rows: most sequences in a step; None is 64 on a CPU, 256 on a GPU.
        token_budget: most tokens in a step; None is 256 on a CPU, 1,024 on a GPU.
        max_context: most tokens a sequence may hold; None takes the model's own limit.
        prefix_reuse: sequences that begin alike share pages.
        swap_space: GiB of host memory for preempted sequences; 0 recomputes them.
        ttft_ms: promised time to first token. tpot_ms: promised mean time per token after it. If
            neither is given a GPU promises what `Promise` says, and a CPU nothing.
        percentile: of the requests for which each of the two is kept.
        no_promise: promise nothing, on a GPU either.
        max_tokens_cap: most tokens of any answer, whatever a request asks for.
        max_queue: most sequences that wait to run; more are refused with 429.
        step: `package.module:factory` of a step function to use instead of the default one.
        executables: folder of steps that `jaxserve compile --save` compiled; None compiles here.
    """

    model: str
    store: Path
    dtype: str | None = None
    weights: str = "auto"
    kv: str = "auto"
    attention: str = "auto"
    page_size: int = 16
    num_pages: int | None = None
    memory_fraction: float | None = None
    max_rows: int | None = None
    token_budget: int | None = None
    max_context: int | None = None
    prefix_reuse: bool = True
    swap_space: float = 1.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    percentile: float = 95.0
    no_promise: bool = False
    max_tokens_cap: int | None = None
    max_queue: int = 512
    step: str | None = None
    executables: Path | None = None


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the HTTP side behaves.

    Attributes:
        tool_parser: how the model writes calls of functions, one of `parsers.formats.FORMATS`;
            "auto" reads it off the chat template, "none" takes no tools.
        reasoning_parser: "think": answers begin with `<think>...</think>`; "auto": if the chat
            template says so; "none": they do not.
        host: address to listen on. port: 0 picks a free one.
        uds: path of a Unix socket to listen on instead.
        ssl_certfile, ssl_keyfile: PEM files for TLS; a key may be in the certificate's file.
        allow_origin: of the web pages that may read the answers; "*" is any.
        requests_per_minute, tokens_per_minute: most of each API key; None is no limit.
        metrics_need_key: /metrics is not open to all where keys are asked for.
        served_model_name: the model id clients use; None derives it from `EngineConfig.model`.
        drain_timeout: seconds that running requests get to finish after SIGTERM.
        max_body_bytes: larger request bodies are refused with 413.
        max_pending: most sequences accepted and unfinished; more are refused with 429.
        heartbeat_timeout: seconds without a sign of life from the worker until /health says 503.
        pooling: of /v1/embeddings, unless the request says: the last hidden state or their mean.
        batch_dir: folder of uploaded files and batches; None takes neither.
        batch_concurrency: most lines of batches at work at once.
        shared_cache: requests of different API keys share computed prompts too. Whoever shares
            them can tell from the time to the first token what others have asked.
    """

    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    allow_origin: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    metrics_need_key: bool = False
    served_model_name: str | None = None
    drain_timeout: float = 30.0
    max_body_bytes: int = 8 << 20
    max_pending: int = 1024
    heartbeat_timeout: float = 15.0
    pooling: Literal["last", "mean"] = "last"
    batch_dir: Path | None = None
    batch_concurrency: int = 32
    shared_cache: bool = False


def encode_engine_config(config: EngineConfig) -> str:
    """JSON, to hand the settings to another process."""
    return msgspec.json.encode(config, enc_hook=str).decode()


def decode_engine_config(text: str) -> EngineConfig:
    """The inverse. Raises msgspec.ValidationError for anything else."""
    return msgspec.json.decode(text, type=EngineConfig, dec_hook=_read_path)


def _read_path(kind: type, value: Any) -> Any:
    return kind(value)
