"""Modules of flax.nnx run under the same step and executor as the built-in decoder."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import MAX_ROWS, NUM_PAGES, PAGE_SIZE, generate, new_state, request, tiny
from flax import nnx

from checkpoints.model_config import ModelConfig
from jaxserve.batch import StepShape
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.executor import JaxExecutor, compile_steps
from jaxserve.models.attention import PagedAttention
from jaxserve.models.decoder import Model
from jaxserve.models.layers import gated_mlp, linear, rms_norm, rope_tables
from jaxserve.models.nnx import from_nnx
from jaxserve.packing import pack
from jaxserve.pages import PagePool
from jaxserve.scheduler import Scheduler
from jaxserve.step import make_step

SHAPE = StepShape(num_tokens=16, num_rows=MAX_ROWS, max_pages=8, page_size=PAGE_SIZE)


class Layer(nnx.Module):
    """A pre-norm transformer layer, in a researcher's own words."""

    def __init__(self, config: ModelConfig, weights: dict[str, jax.Array]) -> None:
        self.config = config
        self.attn_norm = nnx.Param(weights["attn_norm"])
        self.qkv = nnx.Param(weights["qkv"])
        self.out = nnx.Param(weights["o"])
        self.mlp_norm = nnx.Param(weights["mlp_norm"])
        self.gate_up = nnx.Param(weights["gate_up"])
        self.down = nnx.Param(weights["down"])

    def __call__(self, x, rope, pages, attend):
        c = self.config
        normed = rms_norm(x, self.attn_norm[...], c.norm_eps)
        heads = linear(normed, self.qkv[...]).reshape(len(x), -1, c.head_dim)
        q, k, v = jnp.split(heads, (c.num_heads, c.num_heads + c.num_kv_heads), axis=1)
        out, pages = attend(q, k, v, pages, scale=c.attention_scale, window=None, rope=rope)
        x = x + linear(out.reshape(len(x), -1), self.out[...])
        normed = rms_norm(x, self.mlp_norm[...], c.norm_eps)
        return x + gated_mlp(normed, self.gate_up[...], self.down[...], "silu"), pages


class TinyLlama(nnx.Module):
    def __init__(self, config: ModelConfig, params: Any) -> None:
        self.config = config
        self.embed = nnx.Param(params["embed"])
        self.layers = nnx.List([Layer(config, weights) for weights in params["layers"]])
        self.norm = nnx.Param(params["norm"])
        # Tied weights are one Variable in two places.
        self.head = self.embed if config.tied_head else nnx.Param(params["head"])

    def forward(self, layers, token_ids, batch, page_table):
        x = jnp.take(self.embed[...], token_ids, axis=0, mode="clip")
        sizes = {"num_heads": self.config.num_heads, "dtype": x.dtype}
        attend = PagedAttention().prepare(batch, page_table, layers[0], **sizes)
        rope = rope_tables(self.config.layers[0].rope, self.config.head_dim, batch.positions)
        written = []
        for layer, pages in zip(self.layers, layers, strict=True):
            x, pages = layer(x, rope, pages, attend)
            written.append(pages)
        return rms_norm(x, self.norm[...], self.config.norm_eps), tuple(written)

    def unembed(self, hidden):
        return linear(hidden, self.head[...]).astype(jnp.float32)


class Counting(TinyLlama):
    """Remembers something of its own between steps, or would like to."""

    def __init__(self, config: ModelConfig, params: Any) -> None:
        super().__init__(config, params)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def forward(self, layers, token_ids, batch, page_table):
        self.calls[...] += 1
        return super().forward(layers, token_ids, batch, page_table)


@functools.cache
def tiny_llama(name: str) -> TinyLlama:
    return TinyLlama(tiny(name).decoder.config, tiny(name).params)


def engine_of(name: str, model: Model, params: Any) -> Engine:
    loaded = tiny(name)
    steps = compile_steps(make_step(model), params, new_state(loaded), [SHAPE])
    scheduler = Scheduler(
        PagePool(NUM_PAGES, PAGE_SIZE),
        max_rows=SHAPE.num_rows,
        token_budget=SHAPE.num_tokens,
        max_context=SHAPE.max_pages * PAGE_SIZE,
    )
    return Engine(scheduler, JaxExecutor(params, new_state(loaded), steps))


@pytest.mark.parametrize("name", ["llama-untied", "llama-tied"])
def test_an_nnx_module_draws_the_tokens_of_the_decoder(name):
    rng = random.Random(0)
    requests = [
        request(str(i), [rng.randrange(320) for _ in range(n)], 12, seed=i, temperature=t)
        for i, (n, t) in enumerate([(1, 0), (30, 0), (7, 1.0), (50, 1.0)])
    ]
    tokens = generate(engine_of(name, *from_nnx(tiny_llama(name))), requests)
    expected = generate(engine_of(name, tiny(name).decoder, tiny(name).params), requests)
    assert tokens == expected


def test_params_are_plain_dicts_that_share_the_modules_arrays():
    module = tiny_llama("llama-tied")
    _, params = from_nnx(module)
    assert sorted(params) == ["embed", "layers", "norm"], "the tied head is there once"
    assert list(params["layers"]) == [0, 1, 2][: len(module.layers)]
    assert params["layers"][1]["qkv"] is module.layers[1].qkv[...]

    def kinds(tree: Any) -> set[type]:
        if isinstance(tree, dict):
            return {type(tree)}.union(*map(kinds, tree.values()))
        return {type(tree)}

    assert kinds(params) == {dict, type(jnp.zeros(()))}


def test_a_module_without_arrays_gives_shapes_to_compile_for():
    loaded = tiny("llama-untied")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), loaded.params)
    module = nnx.eval_shape(lambda params: TinyLlama(loaded.decoder.config, params), shapes)
    model, params = from_nnx(module)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
    output, _ = jax.eval_shape(make_step(model), params, new_state(loaded), *pack((), SHAPE))
    assert output.token_ids.shape == (SHAPE.num_rows,)


def test_a_module_that_lacks_a_method_is_refused_with_its_name():
    class HeadOnly(nnx.Module):
        def unembed(self, hidden):
            return hidden

    with pytest.raises(ConfigError, match=r"HeadOnly has no forward method.*ServableModule"):
        from_nnx(HeadOnly())


def test_a_module_that_writes_to_its_own_state_is_refused_at_compile_time():
    loaded = tiny("llama-untied")
    model, params = from_nnx(Counting(loaded.decoder.config, loaded.params))
    with pytest.raises(ConfigError, match="writes to calls in a step"):
        compile_steps(make_step(model), params, new_state(loaded), [SHAPE])
    assert np.asarray(params["calls"]) == 0
