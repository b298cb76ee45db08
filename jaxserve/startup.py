"""From settings to an engine that is ready: load the weights, size the pool, compile the steps."""

from __future__ import annotations

import importlib
import logging
import os
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from checkpoints import Store, open_checkpoint
from checkpoints.model_config import ModelConfig
from jaxserve.aot.serving import saved_pages, saved_steps
from jaxserve.aot.target import settle_for_cpu
from jaxserve.batch import StepShape
from jaxserve.calibrate import Calibration, calibrate
from jaxserve.cards import Dtype
from jaxserve.config import USUAL_SIZES, EngineConfig
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.executor import JaxExecutor, Progress, compile_steps, empty_state
from jaxserve.limits import check_budget
from jaxserve.memory import RUNTIME_BYTES, fitting_pages
from jaxserve.models.attention import choose_attention, kv_bytes_per_token
from jaxserve.models.decoder import Decoder
from jaxserve.packing import pack, step_shapes
from jaxserve.pages import PagePool
from jaxserve.policy import NoPromise, Policy
from jaxserve.roofline import model_shape
from jaxserve.scheduler import Scheduler
from jaxserve.sla.promised import Promised
from jaxserve.sla.step_time import StepTimeModel, measured_seed
from jaxserve.step import StepFactory, StepFn, compile_step, make_step
from jaxserve.swap import SwapSpace
from jaxserve.workload import Promise

logger = logging.getLogger("jaxserve.startup")

# A CPU shares its memory with everything else on the machine; a GPU is ours.
MEMORY_FRACTION = {"cpu": 0.1, "gpu": 0.9}


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, and what a person wants to know about it.

    Attributes:
        engine: compiled and empty.
        vocab_size: V of its model.
        description: the device and the sizes chosen.
        longest_step: seconds the largest step takes.
    """

    engine: Engine
    vocab_size: int
    description: str
    longest_step: float


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What steps are compiled for, at most: rows, tokens; and tokens per page."""

    max_rows: int
    token_budget: int
    page_size: int

    def shapes(self, max_context: int) -> tuple[StepShape, ...]:
        """The ladder of shapes."""
        return step_shapes(
            max_rows=self.max_rows,
            token_budget=self.token_budget,
            max_context=max_context,
            page_size=self.page_size,
        )


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
    max_context = resolve_context(config, checkpoint.config)
    attention = choose_attention(config.attention)
    step = resolve_step(config.step, Decoder(checkpoint.config, attention))
    params = checkpoint.load(dtype=dtype, progress=progress)
    num_pages = config.num_pages
    if config.executables is not None:
        num_pages = saved_pages(config, config.executables)
    elif num_pages is None:
        # A CPU shares its memory: there the fraction is for the pages alone, whatever the rest.
        taken = 0
        if platform != "cpu":
            taken = RUNTIME_BYTES + weight_bytes(params)
            taken += step_bytes(sizes, step, params, checkpoint.config, dtype, max_context)
        num_pages = pool_size(config, sizes, checkpoint.config, dtype, max_context, taken)

    pool = PagePool(num_pages, config.page_size)
    max_context = min(max_context, pool.capacity)
    state = empty_state(
        checkpoint.config,
        num_pages=num_pages,
        page_size=config.page_size,
        max_rows=sizes.max_rows,
        dtype=dtype,
    )
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
    page_bytes = kv_bytes_per_token(checkpoint.config, dtype.itemsize) * config.page_size
    scheduler = Scheduler(
        pool,
        max_rows=sizes.max_rows,
        token_budget=sizes.token_budget,
        max_context=max_context,
        prefix_reuse=config.prefix_reuse,
        swap=SwapSpace(pool, int(config.swap_space * 2**30) // page_bytes, calibration.swap_cost),
        policy=make_policy(config, sizes, checkpoint.config, dtype, calibration, platform),
    )
    description = (
        f"{jax.devices()[0].device_kind}, {dtype.name}, {pool.num_total} pages of "
        f"{pool.page_size} tokens, context {scheduler.max_context}, {sizes.max_rows} rows, "
        f"{sizes.token_budget} tokens a step, attention {attention.kind}"
    )
    return LoadedEngine(
        Engine(scheduler, executor),
        checkpoint.config.vocab_size,
        description,
        longest_step=calibration.longest_step,
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
    name = cast(Dtype, dtype.name)
    shape = model_shape(config.model, model, weight_dtype=name, kv_dtype=name)
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
    """The dtype of weights, activations and cache: float32 on a CPU, bfloat16 elsewhere."""
    if name is None:
        name = "float32" if platform == "cpu" else "bfloat16"
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {name!r} is not one of float32, bfloat16, float16")
    return jnp.dtype(name)


def resolve_sizes(config: EngineConfig, platform: str) -> StepSizes:
    """As asked for, or what suits the device. Raises ConfigError if the two do not fit."""
    rows, tokens = USUAL_SIZES.get(platform, USUAL_SIZES["gpu"])
    rows = config.max_rows or min(rows, config.token_budget or rows)
    tokens = config.token_budget or max(tokens, rows)
    check_budget(rows, tokens)
    return StepSizes(rows, tokens, config.page_size)


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


def weight_bytes(params: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(params))


def step_bytes(
    sizes: StepSizes,
    step: StepFn,
    params: Any,
    model: ModelConfig,
    dtype: jnp.dtype,
    max_context: int,
) -> int:
    """Temporary memory of the largest step, by the compiler's own account.

    It does not depend on the size of the cache, so the smallest cache is compiled for.
    """
    state = empty_state(
        model, num_pages=2, page_size=sizes.page_size, max_rows=sizes.max_rows, dtype=dtype
    )
    shape = sizes.shapes(max_context)[-1]
    compiled = compile_step(step, params, state, *pack((), shape))
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def pool_size(
    config: EngineConfig,
    sizes: StepSizes,
    model: ModelConfig,
    dtype: jnp.dtype,
    max_context: int,
    taken: int,
) -> int:
    """Pages that fit beside `taken` bytes, but no more than all rows can use."""
    device = jax.devices()[0]
    total = device_bytes(device)
    fraction = config.memory_fraction or MEMORY_FRACTION.get(device.platform, 0.9)
    page_bytes = kv_bytes_per_token(model, dtype.itemsize) * config.page_size
    most = sizes.max_rows * -(-max_context // config.page_size)
    pages = fitting_pages(fraction * total, taken, page_bytes, most)
    if not pages:
        raise ConfigError(
            f"{taken / 1e9:.1f} GB of weights and temporaries leave no room for pages in "
            f"{fraction:.0%} of the device's {total / 1e9:.1f} GB: use a smaller model or dtype, "
            "a larger --memory-fraction, or set --num-pages"
        )
    return pages


def device_bytes(device: jax.Device) -> int:
    """Memory of the device; of the whole machine for a CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
