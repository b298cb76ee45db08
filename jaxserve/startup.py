"""From settings to an engine that is ready: load the weights, size the pool, compile the steps."""

from __future__ import annotations

import importlib
import logging
import os
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp

from checkpoints import Checkpoint, Store, open_checkpoint
from checkpoints.model_config import ModelConfig
from jaxserve.aot.serving import saved_pages, saved_steps
from jaxserve.aot.target import settle_for_cpu
from jaxserve.calibrate import Calibration, calibrate
from jaxserve.cards import Dtype
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.executor import JaxExecutor, Progress, compile_steps, empty_state
from jaxserve.grammar import Grammars
from jaxserve.huge_pages import settle_on_huge_pages
from jaxserve.models.attention import (
    PagedAttention,
    cache_dtype,
    choose_attention,
    kv_bytes_per_token,
    wanted_attention,
)
from jaxserve.models.decoder import Decoder
from jaxserve.models.packed import pack_params
from jaxserve.pages import PagePool
from jaxserve.policy import NoPromise, Policy
from jaxserve.roofline import model_shape
from jaxserve.scheduler import Scheduler
from jaxserve.sizing import StepSizes, cache_pages, resolve_sizes
from jaxserve.sla.promised import Promised
from jaxserve.sla.step_time import StepTimeModel, measured_seed
from jaxserve.step import StepFactory, StepFn, make_step
from jaxserve.swap import SwapSpace
from jaxserve.workload import Promise

logger = logging.getLogger("jaxserve.startup")


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, and what a person wants to know about it.

    Attributes:
        engine: compiled and empty.
        vocab_size: V of its model.
        description: the device and the sizes chosen.
        longest_step: seconds the largest step takes.
        grammars: makes the matchers of constrained requests.
        promise: what it keeps; None promises nothing.
    """

    engine: Engine
    vocab_size: int
    description: str
    longest_step: float
    grammars: Grammars
    promise: Promise | None = None


def load_engine(config: EngineConfig, *, progress: Progress | None = None) -> LoadedEngine:
    """Build the engine that `config` describes on jax's default device.

    Raises:
        CheckpointError: the model cannot be found or read.
        ConfigError: the settings do not fit together, the model or the device.
    """
    settle_for_cpu()
    store = Store(config.store)
    use_compilation_cache(store.xla_cache)
    checkpoint = open_checkpoint(config.model, store)
    platform = jax.default_backend()
    sizes = resolve_sizes(config, platform)
    dtype = resolve_dtype(config.dtype, platform)
    kv_dtype = cache_dtype(config.kv, dtype)
    max_context = resolve_context(config, checkpoint.config)
    wanted = wanted_attention(checkpoint.config, config.page_size, dtype, kv_dtype)
    attention = choose_attention(config.attention, wanted)
    packed = packs_weights(config.weights, attention, dtype)
    step = resolve_step(config.step, Decoder(checkpoint.config, attention))
    params = checkpoint.load(dtype=dtype, progress=progress)
    if packed:
        int8 = config.weights == "int8"
        params = pack_params(params, tied_head=checkpoint.config.tied_head, int8=int8)
    if config.executables is None:
        num_pages = cache_pages(
            config, sizes, checkpoint.config, kv_dtype, max_context, step=step, params=params
        )
    else:
        num_pages = saved_pages(config, config.executables)

    pool = PagePool(num_pages, config.page_size)
    max_context = min(max_context, pool.capacity)
    state = empty_state(
        checkpoint.config,
        num_pages=num_pages,
        page_size=config.page_size,
        max_rows=sizes.max_rows,
        dtype=kv_dtype,
    )
    settle_on_huge_pages(jax.tree.leaves((params, state)))
    shapes = sizes.shapes(max_context)
    if config.executables is None:
        threads = max(1, min(len(shapes), os.cpu_count() or 1))
        steps = compile_steps(step, params, state, shapes, threads=threads, progress=progress)
    else:
        model, kind = checkpoint.config, attention.kind
        steps = saved_steps(config.executables, model, kind, shapes, params, state)
    executor = JaxExecutor(params, state, steps)
    calibration = calibrate(
        executor,
        max_context=max_context,
        page_size=config.page_size,
        sizes=[shape.num_tokens for shape in shapes],
    )
    page_bytes = kv_bytes_per_token(checkpoint.config, kv_dtype) * config.page_size
    scheduler = Scheduler(
        pool,
        max_rows=sizes.max_rows,
        token_budget=sizes.token_budget,
        max_context=max_context,
        prefix_reuse=config.prefix_reuse,
        swap=SwapSpace(pool, int(config.swap_space * 2**30) // page_bytes, calibration.swap_cost),
        policy=make_policy(config, sizes, checkpoint.config, dtype, calibration, platform),
    )
    pages = "pages" if kv_dtype == dtype else f"{kv_dtype.name} pages"
    weights = ", int8 weights" if config.weights == "int8" else ""
    description = (
        f"{jax.devices()[0].device_kind}, {dtype.name}{weights}, {pool.num_total} {pages} of "
        f"{pool.page_size} tokens, context {scheduler.max_context}, {sizes.max_rows} rows, "
        f"{sizes.token_budget} tokens a step, attention {attention.kind}"
    )
    return LoadedEngine(
        Engine(scheduler, executor),
        checkpoint.config.vocab_size,
        description,
        longest_step=calibration.longest_step,
        grammars=make_grammars(checkpoint),
        promise=resolve_promise(config, platform),
    )


def make_grammars(checkpoint: Checkpoint) -> Grammars:
    """What holds answers of the model to a schema or a grammar."""
    tokenizer, model = checkpoint.tokenizer, checkpoint.config
    return Grammars(
        None if tokenizer is None else tokenizer.tokenizer_json,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
    )


def make_policy(
    config: EngineConfig,
    sizes: StepSizes,
    model: ModelConfig,
    dtype: jnp.dtype,
    calibration: Calibration,
    platform: str,
) -> Policy:
    """The promise that the settings ask for, on a device that has been timed."""
    promise = resolve_promise(config, platform)
    if promise is None:
        return NoPromise(max_queue=config.max_queue, max_tokens_cap=config.max_tokens_cap)
    weights, kv = (cast(Dtype, x.name) for x in (dtype, cache_dtype(config.kv, dtype)))
    shape = model_shape(config.model, model, weight_dtype=weights, kv_dtype=kv)
    seed = measured_seed(shape, calibration.step_seconds)
    counts = [shape.num_tokens for shape in sizes.shapes(model.max_context)]

    def padded(tokens: float) -> float:
        """What the device computes in a step of so many tokens."""
        return counts[bisect_left(counts, tokens)] if tokens <= counts[-1] else tokens

    return Promised(
        promise,
        StepTimeModel(seed, padded=padded),
        max_queue=config.max_queue,
        max_tokens_cap=config.max_tokens_cap,
    )


def resolve_promise(config: EngineConfig, platform: str) -> Promise | None:
    """What to promise; None is nothing. A CPU that was asked for nothing promises nothing: what
    it can keep depends too much on the model and on what else runs there."""
    silent = config.ttft_ms is None and config.tpot_ms is None
    if config.no_promise or (silent and platform == "cpu"):
        return None
    usual = Promise()
    return Promise(
        usual.ttft if config.ttft_ms is None else config.ttft_ms / 1e3,
        usual.tpot if config.tpot_ms is None else config.tpot_ms / 1e3,
        config.percentile,
    )


def use_compilation_cache(folder: Path) -> None:
    """Keep every executable, so that a second start compiles nothing."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def resolve_dtype(name: str | None, platform: str) -> jnp.dtype:
    """The dtype of weights and activations: float32 on a CPU, bfloat16 elsewhere."""
    if name is None:
        name = "float32" if platform == "cpu" else "bfloat16"
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {name!r} is not one of float32, bfloat16, float16")
    return jnp.dtype(name)


def packs_weights(weights: str, attention: PagedAttention, dtype: jnp.dtype) -> bool:
    """Whether the CPU's own kernels multiply. Raises ConfigError if int8 is asked of others."""
    if weights == "int8" and not (attention.kind == "native" and dtype == jnp.float32):
        raise ConfigError(
            "int8 weights are multiplied by the CPU's C++ kernels, of float32 activations: they "
            f"need attention native and dtype float32, not {attention.kind} and {dtype.name}"
        )
    return attention.kind == "native" and dtype in (jnp.float32, jnp.bfloat16)


def resolve_context(config: EngineConfig, model: ModelConfig) -> int:
    """The most tokens a sequence may hold."""
    if config.max_context is None:
        return model.max_context
    if config.max_context > model.max_context:
        raise ConfigError(
            f"a context of {config.max_context} tokens is beyond the {model.max_context} "
            "the model was made for"
        )
    return config.max_context


def resolve_step(name: str | None, decoder: Decoder) -> StepFn:
    """The default step, or the one that `package.module:factory` makes for the model."""
    if name is None:
        return make_step(decoder)
    module, _, factory = name.partition(":")
    try:
        make = cast(StepFactory, getattr(importlib.import_module(module), factory))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--step {name!r}: {error}; expected package.module:factory, importable from here"
        ) from error
    return make(decoder)
