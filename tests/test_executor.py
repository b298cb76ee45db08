"""What the executor does beside steps: copying and moving pages, without ever compiling again."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import drain, make_engine, request
from fixture_files import TINY

import checkpoints
from jaxserve.executor import empty_state
from jaxserve.page_mover import PageMover
from jaxserve.sequence import Sequence
from jaxserve.swap import Move

COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: (
        COMPILED.append(event) if event.endswith("backend_compile_duration") else None
    )
)


def layers_of(executor) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(executor._state.layers)]


def served_engine(kv: str = "auto"):
    engine = make_engine("llama-untied", kv=kv)
    engine.add(request("first", range(5, 45), 8))
    drain(engine)
    return engine


each_cache = pytest.mark.parametrize("kv", ["auto", "int8"])


@each_cache
def test_pages_moved_out_come_back_bit_by_bit_elsewhere(kv):
    executor = served_engine(kv).executor
    before = layers_of(executor)
    owner = Sequence(request("x", [1], 1), tokens=None)  # type: ignore[arg-type]
    pages = tuple(range(1, 41))  # more than one call moves
    executor.move((Move("out", owner, pages),))
    executor.move((Move("in", owner, tuple(range(60, 98)), first=2), Move("drop", owner)))
    after = layers_of(executor)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[60:98], old[3:41])
        untouched = [*range(60), *range(98, len(old))]
        np.testing.assert_array_equal(new[untouched], old[untouched])


def test_copying_and_moving_pages_amid_steps_compiles_nothing():
    engine = served_engine()
    owner = Sequence(request("x", [1], 1), tokens=None)  # type: ignore[arg-type]
    COMPILED.clear()
    for name in "abc":
        engine.executor.move((Move("out", owner, (1, 2, 3)),))
        engine.add(request(name, range(5, 45), 8))
        drain(engine)  # copies the tail of the prompt it has seen before
        engine.executor.move((Move("in", owner, (90, 91, 92)), Move("drop", owner)))
    assert COMPILED == []


def test_a_copied_page_serves_the_tokens_of_the_first():
    engine = make_engine("llama-untied")
    tokens = []
    for name in ("cold", "warm"):
        engine.add(request(name, range(5, 45), 8))
        events = drain(engine)[name]
        tokens.append([event.token_id for event in events])
        copied = events[0].num_cached
    assert copied == 39
    assert tokens[0] == tokens[1]


@each_cache
def test_more_pages_are_copied_than_one_call_copies(kv):
    engine = served_engine(kv)
    executor = engine.executor
    before = layers_of(executor)
    copies = [(page, 100 + page) for page in range(1, 41)]
    executor._state = PageMover(executor._state).copy(executor._state, copies)
    for old, new in zip(before, layers_of(executor), strict=True):
        np.testing.assert_array_equal(new[101:141], old[1:41])
        np.testing.assert_array_equal(new[:101], old[:101])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_moving_pages_takes_no_second_cache(dtype):
    config = checkpoints.open_checkpoint(
        str(TINY / "llama-untied"), checkpoints.Store(TINY / "none")
    ).config
    state = empty_state(config, num_pages=2000, page_size=16, max_rows=2, dtype=jnp.dtype(dtype))
    layers = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape).astype(x.dtype), state.layers
    )
    before = [np.array(leaf) for leaf in jax.tree.leaves(layers)]
    mover = PageMover(state)
    size = sum(leaf.nbytes for leaf in before)
    for executable in mover._run:
        assert executable.memory_analysis().temp_size_in_bytes < size / 4
    after = mover.copy(replace(state, layers=layers), [(1, 7), (5, 1999)]).layers
    for old, new in zip(before, jax.tree.leaves(after), strict=True):
        expected = old.copy()
        expected[[7, 1999]] = old[[1, 5]]
        np.testing.assert_array_equal(np.array(new), expected)
