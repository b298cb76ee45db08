"""From settings to an engine: what is refused, how the pool is sized, what is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from engines import TINY, drain, request, tiny

import checkpoints
from jaxserve.config import EngineConfig, decode_engine_config, encode_engine_config
from jaxserve.errors import ConfigError
from jaxserve.sizing import StepSizes, pool_size, resolve_sizes, step_bytes
from jaxserve.startup import load_engine
from jaxserve.step import make_step

FLOAT32 = jnp.dtype(jnp.float32)
# llama-untied: 3 layers, 2 KV heads of 8, k and v, 16 tokens a page, float32.
PAGE_BYTES = 3 * 2 * 8 * 2 * 16 * 4


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store of our own: what one test compiles the next one finds. Gone afterwards."""
    yield tmp_path_factory.mktemp("store")
    jax.config.update("jax_compilation_cache_dir", None)


def config_for(store: Path, **changes) -> EngineConfig:
    base = EngineConfig(
        str(TINY / "llama-untied"),
        store,
        num_pages=40,
        max_rows=2,
        token_budget=16,
        max_context=128,
    )
    return dataclasses.replace(base, **changes)


def test_settings_survive_the_way_to_another_process(store):
    config = config_for(store, step="examples.norm_probe:make_step", swap_space=0.5)
    assert decode_engine_config(encode_engine_config(config)) == config


def test_a_loaded_engine_serves_and_says_what_it_is(store):
    loaded = load_engine(config_for(store))
    loaded.engine.add(request("a", [5, 6, 7], 4))
    assert len(drain(loaded.engine)["a"]) == 4
    assert loaded.vocab_size == 320
    assert ", float32, 39 pages of 16 tokens, context 128" in loaded.description


def test_an_engine_with_an_int8_cache_serves_and_says_so(store):
    loaded = load_engine(config_for(store, kv="int8"))
    loaded.engine.add(request("a", [5, 6, 7], 4))
    assert len(drain(loaded.engine)["a"]) == 4
    assert ", float32, 39 int8 pages of 16 tokens, context 128" in loaded.description


def test_an_engine_with_int8_weights_serves_and_says_so(store):
    loaded = load_engine(config_for(store, weights="int8", attention="native"))
    loaded.engine.add(request("a", [5, 6, 7], 4))
    assert len(drain(loaded.engine)["a"]) == 4
    assert ", float32, int8 weights, 39 pages of 16 tokens" in loaded.description


def test_the_context_is_no_longer_than_the_pool_can_hold(store):
    loaded = load_engine(config_for(store, num_pages=5))
    assert loaded.engine.scheduler.max_context == 4 * 16


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dtype": "int4"}, "int4"),
        ({"weights": "int8", "dtype": "bfloat16"}, "int8 weights .* not native and bfloat16"),
        ({"weights": "int8", "attention": "cpu"}, "int8 weights .* not cpu and float32"),
        ({"kv": "fp8"}, "kv 'fp8' is not one of auto, int8"),
        ({"kv": "int8", "num_pages": 2**23 + 1}, "8388609 int8 pages .* 8388608 at most"),
        ({"max_context": 100_000}, "512"),
        ({"max_rows": 32}, "16 tokens .* 32 rows"),
        ({"step": "no.such.module:make"}, "package.module:factory"),
        ({"step": "examples.norm_probe"}, "package.module:factory"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_reason(store, changes, words):
    with pytest.raises(ConfigError, match=words):
        load_engine(config_for(store, **changes))


@pytest.mark.parametrize(
    "platform, asked, sizes",
    [
        ("cpu", {}, (64, 256)),
        ("gpu", {}, (256, 1024)),
        ("gpu", {"max_rows": 2000}, (2000, 2000)),
        ("gpu", {"token_budget": 100}, (100, 100)),
        ("cpu", {"max_rows": 8, "token_budget": 32}, (8, 32)),
    ],
)
def test_the_sizes_of_a_step_are_those_asked_for_or_suit_the_device(platform, asked, sizes):
    config = EngineConfig("tiny", Path("store"), **asked)
    assert resolve_sizes(config, platform) == StepSizes(*sizes, config.page_size)


def test_an_unknown_model_is_refused(store):
    with pytest.raises(checkpoints.CheckpointError, match="no model"):
        load_engine(config_for(store, model="nonesuch"))


def test_the_pool_takes_what_is_left_and_no_more_than_the_rows_can_use(store, monkeypatch):
    monkeypatch.setattr("jaxserve.sizing.device_bytes", lambda device: 100 * PAGE_BYTES)
    model = tiny("llama-untied").decoder.config
    config = config_for(store, memory_fraction=0.5)
    many, few = (StepSizes(rows, 1024, config.page_size) for rows in (1000, 2))
    assert pool_size(config, many, model, FLOAT32, 128, taken=0) == 50 + 1
    assert pool_size(config, many, model, FLOAT32, 128, taken=20 * PAGE_BYTES) == 30 + 1
    assert pool_size(config, few, model, FLOAT32, 128, taken=0) == 2 * 8 + 1
    with pytest.raises(ConfigError, match="memory-fraction"):
        pool_size(config, many, model, FLOAT32, 128, taken=49 * PAGE_BYTES)


def test_a_pool_of_int8_pages_holds_more_of_them_up_to_what_kernels_address(store, monkeypatch):
    monkeypatch.setattr("jaxserve.sizing.device_bytes", lambda device: 100 * PAGE_BYTES)
    model = tiny("llama-untied").decoder.config
    config, many = config_for(store, memory_fraction=0.5), StepSizes(1000, 1024, 16)
    room = (config, many, model, jnp.dtype(jnp.int8), 128)
    # Each 8 numbers take 8 bytes and 4 of scale, where they took 32.
    assert pool_size(*room, taken=0) == 50 * 32 // 12 + 1
    monkeypatch.setattr("jaxserve.sizing.most_pages", lambda *_: 100)
    assert pool_size(*room, taken=0) == 100


def test_a_steps_temporaries_are_the_compilers_own_figure(store):
    loaded = tiny("llama-untied")
    step = make_step(loaded.decoder)
    small, large = (
        step_bytes(
            StepSizes(max_rows=2, token_budget=budget, page_size=16),
            step,
            loaded.params,
            loaded.decoder.config,
            FLOAT32,
            128,
        )
        for budget in (8, 64)
    )
    assert 0 < small < large
