"""The whole step through XLA's GPU compiler and NVIDIA's assembler, for every card and model size.

Compile facts, no times. Where every layer is alike a few stand for all: what a layer launches,
moves and needs does not depend on how many there are, which one test sees for a whole model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax.numpy as jnp
import pytest

from jaxserve.aot.compiling import CompiledStep, compile_for
from jaxserve.aot.floor import Case, step_floor
from jaxserve.aot.lower import StepSizes, abstract_state, num_bytes
from jaxserve.aot.target import TARGETS, find_target, make_mesh
from jaxserve.batch import StepShape
from jaxserve.models.attention import PagedAttention
from jaxserve.models.decoder import Decoder
from jaxserve.plan import PLAN_MODELS
from jaxserve.roofline import model_shape
from jaxserve.step import make_step

# The first test waits for a whole model; on a machine busy with other things that takes its time.
pytestmark = pytest.mark.timeout(900)

MODELS = ("llama-3.1-8b", "qwen3-8b", "smollm2-135m")
LAYERS = 3  # the first of them launches what all share as well
NUM_PAGES = 28_000  # 58 GB in all layers of an 8B model
MAX_ROWS = 256

MAX_TEMP_BYTES = 0.5e9
MAX_KERNELS_A_LAYER = 16
MAX_DECODE_RATIO = 1.05
DOTS = {"decode_attention", "prefill_attention"}

SHAPES = {
    "decode": StepShape(64, 64, 63, 16),  # 64 sequences of 1,000 tokens
    "long": StepShape(8, 8, 500, 16),  # 8 of 8,000
    "single": StepShape(1, 1, 63, 16),
    "mixed": StepShape(1024, 256, 512, 16),  # the largest step, rows of up to 8,192 tokens
}
DECODES = {
    "decode": Case("decode", 64, 1, 1_000),
    "long": Case("long", 8, 1, 8_000),
    "single": Case("single", 1, 1, 1_000),
}


class Key(NamedTuple):
    """What is compiled. layers: how many of the model's. kv: type of the cache."""

    model: str
    card: str
    shape: str
    layers: int = LAYERS
    kv: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.model}, {self.card}, {self.shape}, {self.kv}"


KEYS = [Key(model, card, "decode") for model in MODELS for card in TARGETS]
KEYS += [Key(model, card, "mixed") for model in MODELS for card in TARGETS[:2]]
KEYS += [Key("llama-3.1-8b", card, "mixed", kv="int8") for card in TARGETS]
KEYS.append(Key("llama-3.1-8b", "a100-80gb", "decode", kv="int8"))
KEYS += [Key(model, "a100-80gb", shape) for model in MODELS for shape in ("long", "single")]
WHOLE = Key("llama-3.1-8b", "a100-80gb", "decode", layers=32)


def sizes_of(key: Key) -> StepSizes:
    config = PLAN_MODELS[key.model]
    config = dataclasses.replace(config, layers=config.layers[: key.layers])
    return StepSizes(config, NUM_PAGES, MAX_ROWS, jnp.dtype(jnp.bfloat16), jnp.dtype(key.kv))


def compile_key(key: Key) -> CompiledStep:
    target, sizes = find_target(key.card), sizes_of(key)
    step = make_step(Decoder(sizes.model, PagedAttention("triton", target.architecture)))
    return compile_for(step, sizes, SHAPES[key.shape], target, make_mesh(target))


@pytest.fixture(scope="session")
def compiling(request: pytest.FixtureRequest) -> Iterator[dict[Key, Future[CompiledStep]]]:
    """Every step that a selected test asks for, on its way: the compiler works outside the GIL."""
    keys = dict.fromkeys(
        item.callspec.params["key"]
        for item in request.session.items
        if "compiling" in getattr(item, "fixturenames", ())
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {key: pool.submit(compile_key, key) for key in keys}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def compiled(key: Key, compiling: dict[Key, Future[CompiledStep]]) -> CompiledStep:
    return compiling[key].result()


of_every_step = pytest.mark.parametrize("key", [WHOLE, *KEYS], ids=str)


@of_every_step
def test_our_kernels_fit_the_card_and_its_registers(key, compiled):
    kernels = {kernel.name: kernel for kernel in compiled.custom_kernels}
    # One token is no prompt: nothing is launched for those.
    dots = DOTS if key.shape != "single" else {"decode_attention"}
    assert kernels.keys() & DOTS == dots
    for kernel in kernels.values():
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), kernel
        assert kernel.registers <= 255
        assert kernel.shared_bytes <= find_target(key.card).shared_bytes, kernel
    assert {name for name, kernel in kernels.items() if kernel.tensor_core} >= dots


@of_every_step
def test_the_cache_is_updated_in_place_and_nothing_large_is_copied(key, compiled):
    state = abstract_state(sizes_of(key), page_size=16)
    assert compiled.alias_bytes == num_bytes(state)
    assert compiled.temp_bytes < MAX_TEMP_BYTES
    assert compiled.copies == ()


@of_every_step
def test_a_layer_launches_few_kernels_and_never_waits_for_the_host(key, compiled):
    assert compiled.kernels_per_layer <= MAX_KERNELS_A_LAYER
    assert compiled.work.open_loops == 0


@pytest.mark.parametrize(
    "key", [WHOLE, *(k for k in KEYS if k.shape in DECODES and k.card == "a100-80gb")], ids=str
)
def test_decoding_moves_hardly_more_than_it_must(key, compiled):
    model = sizes_of(key).model
    floor = step_floor(model, model_shape(key.model, model, kv_dtype=key.kv), DECODES[key.shape])
    assert compiled.work.unpriced == ()
    assert 1 <= compiled.work.bytes / floor.bytes <= MAX_DECODE_RATIO
    if DECODES[key.shape].rows >= 8:  # to so many XLA fills up the rows of a product
        assert compiled.work.flops == pytest.approx(floor.flops, rel=0.01)


@pytest.mark.parametrize("key", [WHOLE], ids=str)
def test_the_whole_model_fits_the_card_with_its_cache(key, compiled):
    assert compiled.argument_bytes + compiled.temp_bytes < 0.9 * 85.9e9
