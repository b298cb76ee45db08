"""What a server's steps and cache are sized to: what was asked for, or what suits the device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.model_config import ModelConfig
from jaxserve.batch import StepShape
from jaxserve.config import USUAL_SIZES, EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.executor import empty_state
from jaxserve.limits import check_budget
from jaxserve.memory import RUNTIME_BYTES, fitting_pages
from jaxserve.models.attention import kv_bytes_per_token, most_pages
from jaxserve.packing import pack, step_shapes
from jaxserve.rule_writer import rule_bytes
from jaxserve.step import StepFn, compile_step

# A CPU shares its memory with everything else on the machine; a GPU is ours.
MEMORY_FRACTION = {"cpu": 0.1, "gpu": 0.9}


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


def resolve_sizes(config: EngineConfig, platform: str) -> StepSizes:
    """As asked for, or what suits the device. Raises ConfigError if the two do not fit."""
    rows, tokens = USUAL_SIZES.get(platform, USUAL_SIZES["gpu"])
    rows = config.max_rows or min(rows, config.token_budget or rows)
    tokens = config.token_budget or max(tokens, rows)
    check_budget(rows, tokens)
    return StepSizes(rows, tokens, config.page_size)


def cache_pages(
    config: EngineConfig,
    sizes: StepSizes,
    model: ModelConfig,
    kv_dtype: jnp.dtype,
    max_context: int,
    *,
    step: StepFn,
    params: Any,
) -> int:
    """N: what was asked for, or what memory allows.

    Raises:
        ConfigError: nothing fits, or kernels cannot address as much.
    """
    most = most_pages(model, config.page_size, kv_dtype)
    if config.num_pages is not None:
        if config.num_pages > most:
            raise ConfigError(
                f"a cache of {config.num_pages} {kv_dtype.name} pages has more places than 32 bits "
                f"number in a layer: --num-pages may be {most} at most"
            )
        return config.num_pages
    # A CPU shares its memory: there the fraction is for the pages alone, whatever the rest.
    taken = 0
    if jax.default_backend() != "cpu":
        taken = RUNTIME_BYTES + weight_bytes(params)
        taken += rule_bytes(sizes.max_rows, model.vocab_size)
        taken += step_bytes(sizes, step, params, model, kv_dtype, max_context)
    return pool_size(config, sizes, model, kv_dtype, max_context, taken)


def weight_bytes(params: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(params))


def step_bytes(
    sizes: StepSizes,
    step: StepFn,
    params: Any,
    model: ModelConfig,
    kv_dtype: jnp.dtype,
    max_context: int,
) -> int:
    """Temporary memory of the largest step, by the compiler's own account.

    It does not depend on the size of the cache, so the smallest cache is compiled for.
    """
    state = empty_state(
        model, num_pages=2, page_size=sizes.page_size, max_rows=sizes.max_rows, dtype=kv_dtype
    )
    shape = sizes.shapes(max_context)[-1]
    compiled = compile_step(step, params, state, *pack((), shape))
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def pool_size(
    config: EngineConfig,
    sizes: StepSizes,
    model: ModelConfig,
    kv_dtype: jnp.dtype,
    max_context: int,
    taken: int,
) -> int:
    """Pages that fit beside `taken` bytes, but no more than all rows can use or kernels reach."""
    device = jax.devices()[0]
    total = device_bytes(device)
    fraction = config.memory_fraction or MEMORY_FRACTION.get(device.platform, 0.9)
    page_bytes = kv_bytes_per_token(model, kv_dtype) * config.page_size
    most = sizes.max_rows * -(-max_context // config.page_size)
    most = min(most, most_pages(model, config.page_size, kv_dtype) - 1)
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
