"""An int8 cache: nearly the float model's numbers, the same for everyone however it is served."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from crowd import MODELS, Events, alone, assert_same, make_requests, serve
from engines import FAMILIES, all_logits, drain, make_engine, new_state, request, tiny
from test_engine import SERVING
from test_golden_tiny import golden

from jaxserve.errors import ConfigError
from jaxserve.models.attention import cache_dtype, empty_pages, kv_bytes_per_token, most_pages
from jaxserve.plan import PLAN_MODELS
from jaxserve.roofline import model_shape
from pallas_kernels.check import MAX_INT8_ELEMENTS

INT8, FLOAT32 = jnp.dtype(jnp.int8), jnp.dtype(jnp.float32)

# Of 8 numbers under one scale, and through at most 6 layers.
FARTHEST, ON_AVERAGE = 0.15, 0.02
STEP = 2e-3
"""What one number of a key does to a log-probability if it is rounded up instead of down: what
decides that is the last bit of the float it comes from, which depends on the shape of the step."""

WAYS = (
    "in a crowd",
    "arriving on the way, in small chunks",
    "short of pages, in small chunks",
    "swapped to the host amid prefill",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_stay_near_those_of_the_float_model(family):
    for case in golden(family):
        got = all_logits(tiny(family), case["prompt"].tolist(), kv="int8")
        ours, theirs = (
            np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
            for logits in (got[-len(case["logits"]) :], case["logits"])
        )
        distance = np.abs(ours - theirs)
        assert distance.max() < FARTHEST
        assert distance.mean() < ON_AVERAGE


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_everyone_gets_the_tokens_they_would_get_alone(name, way):
    how: dict[str, int]
    drive: Callable[..., Events]
    how, drive = SERVING[way]
    engine = make_engine(name, kv="int8", **how)
    assert_same(drive(engine, make_requests()), alone(name, "int8"), atol=STEP)
    assert (engine.scheduler.num_preemptions > 0) == ("usable_pages" in how)
    assert (engine.scheduler.swap.num_swaps > 0) == ("swap_pages" in how)


def test_a_prompt_found_in_the_cache_gives_the_same_again():
    """Of 40 tokens two pages are shared and the third is copied, its scales with it."""
    engine = make_engine("llama-untied", kv="int8")
    answers = [
        serve(engine, [request(name, range(5, 45), 20, top_logprobs=3)])[name]
        for name in ("cold", "warm")
    ]
    assert [events[0].num_cached for events in answers] == [0, 39]
    assert_same({"": answers[1]}, {"": answers[0]}, atol=STEP)


def test_the_cache_is_what_was_asked_for_and_is_used():
    engine = make_engine("llama-untied", kv="int8")
    engine.add(request("a", range(5, 45), 8))
    drain(engine)
    for layer in engine.executor._state.layers:
        assert (layer.k.dtype, layer.v.dtype) == (jnp.int8, jnp.int8)
        for pages, scale in zip((layer.k, layer.v), layer.scales, strict=True):
            written = np.asarray(scale) > 0
            assert written.sum() == np.prod(scale.shape[2:]) * 47  # the last token has no keys
            assert np.abs(np.asarray(pages)[written]).max(axis=-1).min() == 127


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-270m", "smollm2-135m"])
@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16", "float32"])
def test_the_planner_and_the_engine_count_the_same_bytes(name, kv_dtype):
    config = PLAN_MODELS[name]
    shape = model_shape(name, config, kv_dtype=kv_dtype)
    assert kv_bytes_per_token(config, jnp.dtype(kv_dtype)) == shape.kv_bytes_per_token
    state = new_state(tiny("llama-untied"), num_pages=7, kv="int8")
    pages = sum(leaf.nbytes for leaf in jax.tree.leaves(state.layers))
    assert pages == 7 * 16 * kv_bytes_per_token(tiny("llama-untied").decoder.config, INT8)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-270m", "smollm2-135m"])
def test_the_most_pages_are_as_many_as_kernels_take(name):
    config = dataclasses.replace(PLAN_MODELS[name], layers=PLAN_MODELS[name].layers[:1])
    most = most_pages(config, 16, INT8)
    for num_pages, fits in ((most, True), (most + 1, False)):
        (layer,) = jax.eval_shape(lambda n=num_pages: empty_pages(config, n, 16, INT8))
        assert (layer.k.size <= MAX_INT8_ELEMENTS) == fits
    assert most_pages(config, 16, FLOAT32) > most


def test_another_kind_of_cache_is_refused():
    assert cache_dtype("auto", FLOAT32) == FLOAT32
    with pytest.raises(ConfigError, match="kv 'fp8' is not one of auto, int8"):
        cache_dtype("fp8", FLOAT32)
