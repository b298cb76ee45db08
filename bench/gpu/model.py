"""A model of random weights on the device, and all that serving it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from bench.gpu.timing import on_gpu, random
from checkpoints.model_config import ModelConfig
from jaxserve.aot.lower import StepSizes, abstract_params, abstract_state, num_bytes
from jaxserve.batch import DeviceState, StepShape
from jaxserve.memory import RUNTIME_BYTES, fitting_pages
from jaxserve.models.attention import choose_attention, kv_bytes_per_token
from jaxserve.models.decoder import Decoder
from jaxserve.models.llama import Params
from jaxserve.packing import step_shapes
from jaxserve.plan.models import PLAN_MODELS
from jaxserve.sizing import device_bytes
from jaxserve.step import StepFn, make_step

PAGE_SIZE = 16
DEVIATION = 0.02
"""Of the weights: small enough that activations stay finite through all layers."""
TEMPORARY_BYTES = 3 << 30
"""Left for what a step needs besides weights and pages, and for making those."""

_LLAMA = PLAN_MODELS["llama-3.1-8b"]
TINY = dataclasses.replace(
    _LLAMA,
    vocab_size=320,
    width=64,
    mlp_width=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    layers=_LLAMA.layers[:1],
)


Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is served, by device.

    Attributes:
        models: by name; the first one that fits is taken.
        max_rows: R. token_budget: most tokens in a step. max_context: tokens of a sequence.
        steps: kind and tokens of those that are timed, the ones wanted most first.
        crowds: requests sent at once to the engine.
        prompt, output: tokens of each.
    """

    models: Mapping[str, ModelConfig]
    max_rows: int
    token_budget: int
    max_context: int
    steps: tuple[tuple[Kind, int], ...]
    crowds: tuple[int, ...]
    prompt: int
    output: int


GPU = Sizes(
    models={name: PLAN_MODELS[name] for name in ("llama-3.1-8b", "llama-3.2-1b")},
    max_rows=256,
    token_budget=1024,
    max_context=2048,
    steps=(
        ("prefill", 1024),
        ("decode", 256),
        ("decode", 32),
        ("decode", 64),
        ("decode", 1),
        ("decode", 128),
        ("decode", 8),
    ),
    crowds=(32, 300),
    prompt=256,
    output=64,
)
CPU = Sizes(
    models={"tiny": TINY},
    max_rows=4,
    token_budget=4,
    max_context=64,
    steps=(("prefill", 4), ("decode", 4)),  # of one shape: compiled once
    crowds=(6,),
    prompt=10,
    output=8,
)
ENGINE_SHAPES = 3
"""The engine gets the shapes of so many of the first `steps`."""


@dataclass(frozen=True, slots=True)
class RandomModel:
    """Everything an executor wants, in bfloat16 (float32 on a CPU).

    Attributes:
        name: of its dimensions. config: those.
        sizes: what it is served with.
        dtype: of weights and cache. num_pages: N, the null page included.
        step: the step function. params: its weights. state: full of random keys and values.
    """

    name: str
    config: ModelConfig
    sizes: Sizes
    dtype: jnp.dtype
    num_pages: int
    step: StepFn
    params: Params
    state: DeviceState

    @property
    def shapes(self) -> dict[int, StepShape]:
        """The shapes of the steps that are timed, by tokens, of the ladder a server compiles."""
        ladder = step_shapes(
            max_rows=self.sizes.max_rows,
            token_budget=self.sizes.token_budget,
            max_context=self.sizes.max_context,
            page_size=PAGE_SIZE,
        )
        by_tokens = {shape.num_tokens: shape for shape in ladder}
        return {tokens: by_tokens[tokens] for _, tokens in self.sizes.steps}


def random_model() -> RandomModel:
    """The largest model that the device has room for, with as many pages as its rows can use.

    Raises:
        MemoryError: there is none.
    """
    sizes, dtype = (GPU, jnp.dtype(jnp.bfloat16)) if on_gpu() else (CPU, jnp.dtype(jnp.float32))
    usable = 0.95 * device_bytes(jax.devices()[0])
    most = sizes.max_rows * sizes.max_context // PAGE_SIZE
    for name, config in sizes.models.items():
        params = abstract_params(config, dtype)
        taken = num_bytes(params) + RUNTIME_BYTES + TEMPORARY_BYTES
        page = kv_bytes_per_token(config, dtype) * PAGE_SIZE
        num_pages = fitting_pages(usable, taken, page, most)
        if num_pages > sizes.max_context // PAGE_SIZE:
            state = abstract_state(
                StepSizes(config, num_pages, sizes.max_rows, dtype, dtype), PAGE_SIZE
            )
            step = make_step(Decoder(config, choose_attention("auto")))
            filled = fill(params, DEVIATION), fill(state, 1.0)
            return RandomModel(name, config, sizes, dtype, num_pages, step, *filled)
    raise MemoryError(f"{usable / 1e9:.1f} GB hold none of {', '.join(sizes.models)}")


def fill(tree: Any, deviation: float) -> Any:
    """Arrays of these shapes: numbers around zero, around one where they are norms."""
    specs, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [_filled(i, x, deviation) for i, x in enumerate(specs)])


def _filled(seed: int, spec: jax.ShapeDtypeStruct, deviation: float) -> jax.Array:
    if not jnp.issubdtype(spec.dtype, jnp.floating):
        return jnp.zeros(spec.shape, spec.dtype)  # tokens of slots that nobody has had yet
    mean = 1.0 if len(spec.shape) == 1 else 0.0
    return random(seed, spec.shape, spec.dtype, mean=mean, deviation=deviation)
