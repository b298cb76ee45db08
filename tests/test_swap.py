"""Preempted sequences that wait on the host come back with everything they had."""

from __future__ import annotations

import pytest
from toy_scheduling import ToyEngine, make_request, serve, tokens_alone

from jaxserve.pages import PagePool
from jaxserve.request import Request, SamplingParams
from jaxserve.swap import SwapCost, SwapSpace

both_loops = pytest.mark.parametrize("look_ahead", [True, False], ids=["look-ahead", "in turn"])


def total_computed(engine: ToyEngine) -> int:
    return sum(span.num_tokens for spans in engine.steps for span in spans)


@both_loops
@pytest.mark.parametrize("prefix_reuse", [False, True])
def test_a_swapped_sequence_computes_nothing_twice(look_ahead, prefix_reuse):
    engine = ToyEngine(
        num_pages=11,
        page_size=16,
        look_ahead=look_ahead,
        prefix_reuse=prefix_reuse,
        swap_pages=100,
    )
    serve(engine, *(make_request(name, 40, 60) for name in "abc"))
    assert engine.scheduler.num_preemptions == engine.scheduler.swap.num_swaps > 0
    late_rows = 3 * look_ahead  # a finish is noticed a step late, unless max_tokens foretells it
    assert total_computed(engine) <= 3 * (40 + 60 - 1) + late_rows


@both_loops
def test_a_swap_space_that_is_too_small_recomputes_and_changes_no_token(look_ahead):
    engine = ToyEngine(num_pages=11, page_size=16, look_ahead=look_ahead, swap_pages=2)
    serve(engine, *(make_request(name, 40, 60) for name in "abc"))
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.swap.num_swaps == 0
    assert total_computed(engine) > 3 * 99


def test_an_abort_forgets_what_was_saved():
    engine = ToyEngine(num_pages=11, page_size=16, swap_pages=100)
    engine.add(*(make_request(name, 40, 60) for name in "abc"))
    while not engine.scheduler.swap.num_swaps:
        engine.step()
    (victim,) = (s for s in engine.scheduler.waiting if s.num_swapped)
    assert engine.scheduler.abort(victim.request.request_id)
    engine.drain()


@both_loops
@pytest.mark.parametrize("num_pages", range(8, 13))
def test_a_gap_in_what_can_be_shared_is_restored_and_not_counted_as_free(num_pages, look_ahead):
    """Two samples copy the prompt's last page; then the original, the one found, is evicted."""
    engine = ToyEngine(num_pages=num_pages, prefix_reuse=True, swap_pages=50, look_ahead=look_ahead)
    prompt = make_request("p", 8, 1).prompt_ids
    engine.add(Request("first", prompt, SamplingParams(1)))
    engine.drain()
    samples = [Request("a", prompt, SamplingParams(20)), Request("b", prompt, SamplingParams(18))]
    engine.add(*samples)
    engine.drain()
    for sample in samples:
        assert engine.tokens(sample.request_id) == tokens_alone(sample)


def test_the_cheaper_way_back_is_taken():
    pool = PagePool(100, 16)
    cost = SwapCost(seconds_per_page=1.0, seconds_per_token=0.5, seconds_fixed=10.0)
    assert not cost.swap_pays(num_pages=1, num_tokens=16)  # 11 s against 8
    assert cost.swap_pays(num_pages=10, num_tokens=160)  # 20 s against 80
    space = SwapSpace(pool, 100, SwapCost(9.0, 0.5))
    engine = ToyEngine(num_pages=11, page_size=16)
    engine.add(make_request("a", 40, 4))
    engine.step()
    assert not space.save(engine.sequence("a"))
    engine.drain()
