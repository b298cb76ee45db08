"""Executables in files: what is loaded draws the same tokens, and what does not fit is refused.

On the CPU, whose executables are saved and loaded by the same code as a card's.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from engines import TINY, drain, request, tiny

from jaxserve.aot.saved import (
    Manifest,
    differences,
    fingerprint,
    load_steps,
    make_manifest,
    read_manifest,
    save_steps,
)
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.executor import compile_steps, empty_state
from jaxserve.packing import pack, step_shapes
from jaxserve.startup import load_engine
from jaxserve.step import make_step

SHAPES = step_shapes(max_rows=2, token_budget=4, max_context=32, page_size=16)  # 1 and 4 tokens


@pytest.fixture(scope="module")
def loaded():
    return tiny("llama-untied")


@pytest.fixture(scope="module")
def manifest(loaded) -> Manifest:
    return make_manifest(
        loaded.decoder.config,
        "cpu",
        new_state(loaded),
        SHAPES,
        dtype="float32",
        device_kind=jax.devices()[0].device_kind,
    )


def new_state(loaded):
    return empty_state(
        loaded.decoder.config, num_pages=8, page_size=16, max_rows=2, dtype=np.dtype("float32")
    )


@pytest.fixture(scope="module")
def compiled(loaded):
    return compile_steps(make_step(loaded.decoder), loaded.params, new_state(loaded), SHAPES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, manifest, compiled):
    folder = tmp_path_factory.mktemp("executables")
    assert save_steps(folder, manifest, compiled) > 0
    return folder


def test_loaded_steps_compute_what_the_compiled_ones_do(loaded, folder, manifest, compiled):
    steps = load_steps(folder, manifest, SHAPES, loaded.params, new_state(loaded))
    assert steps.keys() == compiled.keys()
    batch, page_table = pack((), SHAPES[-1])
    batch = batch.replace(
        token_ids=np.array([5, 6, 7, 0], np.int32),
        positions=np.array([0, 1, 2, 0], np.int32),
        row_ids=np.array([0, 0, 0, 2], np.int32),
        row_start=np.array([0, 3, 3], np.int32),
        kv_len=np.array([3, 0], np.int32),
    )
    page_table = page_table.replace(pages=np.array([[1, 0], [0, 0]], np.int32))
    results = [
        program[SHAPES[-1]](loaded.params, new_state(loaded), batch, page_table)
        for program in (compiled, steps)
    ]
    assert int(results[0][0].token_ids[0]) >= 0
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"jaxlib": "0.1.0"}, "jaxlib .* there, 0.1.0 here"),
        ({"jax": "0.1.0"}, "jax .* there, 0.1.0 here"),
        ({"device_kind": "NVIDIA H200"}, "device kind cpu there, NVIDIA H200 here"),
        ({"model": "another"}, "model .* there, another here"),
        ({"num_pages": 9, "dtype": "bfloat16"}, "dtype float32 .* here; num pages 8 there, 9 here"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_executables_of_anything_else_are_refused_with_the_reason(
    loaded, folder, manifest, change, reason
):
    here = dataclasses.replace(manifest, **change)
    with pytest.raises(ConfigError, match=f"do not fit: {reason}.*Compile them again"):
        load_steps(folder, here, SHAPES, loaded.params, new_state(loaded))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    yield tmp_path_factory.mktemp("store")
    jax.config.update("jax_compilation_cache_dir", None)


def serve(store, **settings):
    """An engine on the saved model, set up as the executables are."""
    config = EngineConfig(
        model=str(TINY / "llama-untied"),
        store=store,
        max_rows=2,
        token_budget=4,
        max_context=32,
        swap_space=0.0,
        attention="cpu",  # which `compile` takes for a card that is a CPU
    )
    return load_engine(dataclasses.replace(config, **settings)).engine


def test_a_server_starts_from_executables_and_draws_the_same_tokens(store, folder, monkeypatch):
    def no_compiling(*arguments, **settings):
        raise AssertionError("a step is being compiled")

    compiled_here = serve(store, num_pages=8)
    monkeypatch.setattr("jaxserve.startup.compile_steps", no_compiling)
    found = []
    for engine in (compiled_here, serve(store, executables=folder)):
        engine.add(request("a", range(5, 15), 6))
        found.append([event.token_id for event in drain(engine)["a"]])
    assert found[0] == found[1]
    assert len(found[0]) == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_pages": 9}, "are for 8 pages: leave out --num-pages 9"),
        ({"step": "examples.norm_probe:make"}, "of the default step: leave out --step examples"),
        ({"max_rows": 3}, "max rows 2 there, 3 here"),
        ({"kv": "int8"}, "kv dtype float32 there, int8 here"),
        ({"max_context": 64}, "max pages 2 there, 4 here"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_server_set_up_differently_says_what_differs(
    store, folder, monkeypatch, settings, message
):
    monkeypatch.setattr("jaxserve.startup.resolve_step", lambda name, decoder: make_step(decoder))
    with pytest.raises(ConfigError, match=message):
        serve(store, executables=folder, **settings)


def test_a_platform_version_counts_only_where_both_sides_know_it(manifest):
    ours = dataclasses.replace(manifest, platform_version="cuda 12090")
    theirs = dataclasses.replace(manifest, platform_version="cuda 12080")
    assert differences(manifest, ours) == []
    assert differences(theirs, ours) == ["platform version cuda 12080 there, cuda 12090 here"]


def test_a_shape_that_was_not_saved_is_named(loaded, folder, manifest):
    shape = dataclasses.replace(SHAPES[0], num_tokens=3, num_rows=1)
    with pytest.raises(ConfigError, match="no executable for a step of 3 tokens in 1 rows"):
        load_steps(folder, manifest, (shape,), loaded.params, new_state(loaded))


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no executables.*jaxserve compile --save"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"jax": "0.10.2"}')
    with pytest.raises(ConfigError, match="not a manifest of this version"):
        read_manifest(tmp_path)


def test_a_model_is_told_from_another_by_any_of_its_settings(loaded):
    config = loaded.decoder.config
    assert fingerprint(config) == fingerprint(dataclasses.replace(config))
    assert fingerprint(config) != fingerprint(dataclasses.replace(config, norm_eps=1e-3))
