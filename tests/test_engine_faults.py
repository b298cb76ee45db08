"""What must not matter, what must fail alone, and what must fail aloud."""

from __future__ import annotations

import math

import jax
import msgspec
import numpy as np
import pytest
from crowd import (
    MODELS,
    alone,
    assert_same,
    both_loops,
    both_models,
    make_requests,
    prompts,
    serve,
    tokens,
)
from engines import (
    MAX_CONTEXT,
    MAX_ROWS,
    NUM_PAGES,
    PAGE_SIZE,
    compiled,
    make_engine,
    new_state,
    request,
    tiny,
)

from jaxserve.engine import Engine
from jaxserve.executor import JaxExecutor, Launched, Prepared
from jaxserve.packing import pack
from jaxserve.pages import PagePool
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Drawn, Span
from jaxserve.step import compile_step, make_step

# What is not a number.


@both_models
def test_what_the_cache_holds_at_first_has_no_influence(name):
    empty, full = (
        {
            key: [msgspec.structs.replace(event, queued=0.0) for event in events]
            for key, events in serve(
                make_engine(name, usable_pages=30, fill=fill), make_requests()
            ).items()
        }
        for fill in (0.0, np.nan)
    )
    assert full == empty


def engine_over(executor, **options) -> Engine:
    scheduler = Scheduler(
        PagePool(NUM_PAGES, PAGE_SIZE), max_rows=MAX_ROWS, token_budget=64, max_context=MAX_CONTEXT
    )
    return Engine(scheduler, executor, **options)


@both_loops
@pytest.mark.parametrize("place", [0, 70, 99])
def test_a_request_that_turns_nan_fails_alone(place, look_ahead):
    """Token 0 is also what padding looks like, and what a fed -1 is clipped to."""
    name = "llama-untied"
    params = dict(tiny(name).params)
    params["embed"] = params["embed"].at[0].set(np.nan)
    engine = engine_over(
        JaxExecutor(params, new_state(tiny(name)), compiled(name, NUM_PAGES)), look_ahead=look_ahead
    )
    prompt = prompts(3)[7][:100]
    prompt[place] = 0
    expected = {key: events for key, events in alone(name).items() if 0 not in tokens(events)}
    neighbours = [each for each in make_requests() if each.request_id in expected]
    assert len(neighbours) > 8

    got = serve(engine, [neighbours[0], request("poisoned", prompt, 20), *neighbours[1:]])
    (failure,) = got.pop("poisoned")
    assert failure.token_id is None and failure.finish_reason == "error"
    assert "not finite" in failure.message
    assert_same(got, expected)
    assert engine.counters.output_tokens == 20 * len(neighbours)
    # Again, on the pages that now hold NaN.
    engine.scheduler.pool.forget()
    assert_same(serve(engine, neighbours), expected)


# The device's side.


@both_models
def test_every_step_updates_the_whole_state_in_place(name):
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(new_state(tiny(name))))
    for shape, step in compiled(name, NUM_PAGES).items():
        assert step.memory_analysis().alias_size_in_bytes >= state_bytes, shape


def test_a_large_cache_is_neither_copied_nor_moved():
    loaded, shape = tiny(MODELS[0]), min(compiled(MODELS[0], NUM_PAGES))
    state = jax.eval_shape(lambda: new_state(loaded, num_pages=20_000))
    leaves = jax.tree.leaves(state)
    state_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    step = compile_step(make_step(loaded.decoder), loaded.params, state, *pack((), shape))
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes >= state_bytes
    assert memory.temp_size_in_bytes < state_bytes / 50


def test_a_stray_shape_is_an_error_and_never_a_compilation():
    loaded = tiny(MODELS[0])
    (small, first), (large, _) = sorted(compiled(MODELS[0], NUM_PAGES).items())
    with pytest.raises(TypeError):
        first(loaded.params, new_state(loaded), *jax.device_put(pack((), large)))
    assert small < large


class FailingExecutor:
    """Does what it is told until the step that fails."""

    def __init__(self, *, fail_at: int, in_launch: bool) -> None:
        self._steps_left = fail_at
        self._in_launch = in_launch

    def move(self, moves: object) -> None:
        """There is nothing to move."""

    def prepare(self, spans: tuple[Span, ...]) -> Prepared:
        return Prepared(spans, (), False, None, None, None)

    def launch(self, prepared: Prepared) -> Launched:
        self._fail(self._in_launch)
        return Launched(prepared.spans, None, 0.0)

    def is_done(self, launched: Launched) -> bool:
        return False

    def collect(self, launched: Launched) -> list[Drawn]:
        self._fail(not self._in_launch)
        return [Drawn(1) for _ in launched.spans]

    def _fail(self, here: bool) -> None:
        if here and not self._steps_left:
            raise RuntimeError("the device is lost")
        self._steps_left -= here


@both_loops
@pytest.mark.parametrize("in_launch", [True, False], ids=["launch", "collect"])
@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_failed_step_reaches_the_caller(fail_at, in_launch, look_ahead):
    executor = FailingExecutor(fail_at=fail_at, in_launch=in_launch)
    engine = engine_over(executor, look_ahead=look_ahead)
    engine.add(request("a", [1, 2, 3], 10))
    with pytest.raises(RuntimeError, match="the device is lost"):
        for _ in range(10):
            engine.step()
