"""Too few pages: who gives way, who waits, and that nobody's tokens show it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_scheduling import PAGE, ToyEngine, make_request, serve, tokens_alone

from jaxserve.errors import RequestError
from jaxserve.request import Request

both_loops = pytest.mark.parametrize("look_ahead", [True, False], ids=["look-ahead", "in turn"])


@both_loops
@pytest.mark.parametrize("budget", [8, 32, 200])
def test_three_requests_in_room_for_one_and_a_half_end_as_they_would_alone(budget, look_ahead):
    engine = ToyEngine(num_pages=11, page_size=16, token_budget=budget, look_ahead=look_ahead)
    serve(engine, *(make_request(name, 40, 60) for name in "abc"))
    assert engine.scheduler.num_preemptions > 0
    assert engine.streak <= 2
    serve(engine, make_request("fresh", 40, 60))


@both_loops
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_preemption_at_a_page_boundary_changes_nothing(page_size, look_ahead):
    """Prompts fill their pages to the last place, so that the first decode needs one more."""
    engine = ToyEngine(
        num_pages=1 + 96 // page_size, page_size=page_size, token_budget=64, look_ahead=look_ahead
    )
    serve(engine, *(make_request(name, 32, 33) for name in "abc"))
    assert engine.scheduler.num_preemptions > 0


@both_loops
def test_a_request_preempted_several_times_neither_drops_nor_repeats_a_token(look_ahead):
    engine = ToyEngine(num_pages=11, look_ahead=look_ahead)
    long, short = make_request("long", 4, 30), make_request("short", 3, 20)
    victim = make_request("victim", 12, 20)
    engine.add(long, short, victim)
    sequence = engine.sequence("victim")
    engine.drain()
    assert sequence.num_preemptions >= 2
    for request in (long, short, victim):
        assert engine.tokens(request.request_id) == tokens_alone(request)


@both_loops
def test_a_request_preempted_amid_its_prefill_starts_over(look_ahead):
    engine = ToyEngine(num_pages=18, max_rows=4, token_budget=5, look_ahead=look_ahead)
    old = [make_request(name, 1, 30) for name in "abc"]
    engine.add(*old)
    for _ in range(6):
        engine.step()
    young = make_request("young", 40, 4)
    engine.add(young)
    sequence = engine.sequence("young")
    computed = []
    while engine.has_work and not sequence.num_preemptions:
        computed.append(sequence.num_computed)
        engine.step()
    assert sequence.num_preemptions and 0 < computed[-1] < 40
    engine.drain()
    for request in (*old, young):
        assert engine.tokens(request.request_id) == tokens_alone(request)


def test_a_request_whose_last_token_lands_after_its_preemption_ends_there():
    """Only with a step in flight: the pages go while the token that ends it is on its way."""
    ended = 0
    for max_tokens in range(1, 12):
        engine = ToyEngine(num_pages=7)
        old, young = make_request("old", 8, 16), make_request("young", 8, max_tokens)
        engine.add(old, young)
        sequence = engine.sequence("young")
        engine.drain()
        ended += sequence.num_preemptions > 0 and sequence.num_computed == 0
        assert engine.tokens("young") == tokens_alone(young)
        assert engine.tokens("old") == tokens_alone(old)
    assert ended > 0, "no trace reached the case"


def test_the_youngest_keeps_its_pages_until_someone_older_needs_them():
    engine = ToyEngine(num_pages=6, look_ahead=False)
    old, young = make_request("old", 6, 8), make_request("young", 12, 8)
    engine.add(old, young)
    engine.step()
    first, second = engine.sequence("old"), engine.sequence("young")
    assert len(first.pages) + len(second.pages) == 5
    engine.step()
    assert [span.sequence for span in engine.steps[-1]] == [first], "no page for the younger"
    assert second.num_preemptions == 0 and len(second.pages) == 3
    for _ in range(PAGE):
        engine.step()
    assert second.num_preemptions == 1
    engine.drain()
    assert engine.tokens("young") == tokens_alone(young)


def test_a_prompt_whose_chunk_finds_too_few_pages_takes_those_there_are():
    engine = ToyEngine(num_pages=7, token_budget=12, look_ahead=False)
    engine.add(make_request("old", 4, 20), make_request("young", 20, 4))
    prompt = engine.sequence("young")
    engine.step()
    assert prompt.num_computed == 8 and engine.scheduler.pool.num_free == 3
    engine.step()  # the older one takes a page, the chunk of 11 tokens would need three
    assert prompt.num_computed == 16 and prompt.num_preemptions == 0
    engine.drain()
    assert engine.tokens("young") == tokens_alone(make_request("young", 20, 4))


@pytest.mark.parametrize("num_pages", range(20, 30))
def test_of_two_prompts_without_pages_the_younger_gives_way(num_pages):
    """Three decodes outgrow what was free when the prompts were admitted."""
    engine = ToyEngine(num_pages=num_pages, token_budget=8)
    requests = [make_request(name, 1, 30) for name in "abc"]
    requests += [make_request("older", 40, 4), make_request("younger", 36, 4)]
    engine.add(*requests)
    older = engine.sequence("older")
    while older.slot < 0:
        engine.step()
    waited = 0  # steps in a row behind somebody younger: at most until that one needs a page
    while older.num_computed < 40:
        before = older.num_computed
        engine.step()
        behind = older.slot >= 0 and engine.scheduler.running[-1] is not older
        waited = waited + 1 if behind and older.num_computed == before else 0
        assert waited <= PAGE
    engine.drain()
    for request in requests:
        assert engine.tokens(request.request_id) == tokens_alone(request)


def test_nobody_is_admitted_on_pages_that_admitted_prompts_still_need():
    engine = ToyEngine(num_pages=11, token_budget=8)
    engine.add(make_request("a", 32, 4), make_request("b", 20, 4))
    engine.step()
    assert [s.request.request_id for s in engine.scheduler.running] == ["a"]
    assert engine.scheduler.pool.num_free > 5, "there are pages, but they are promised"


@both_loops
def test_a_preempted_request_can_be_aborted_while_its_token_is_in_flight(look_ahead):
    engine = ToyEngine(num_pages=9, look_ahead=look_ahead)
    old = make_request("old", 4, 24)
    engine.add(old, make_request("young", 14, 10))
    while engine.has_work and not engine.scheduler.num_preemptions:
        engine.step()
    heard = len(engine.events["young"])
    assert engine.scheduler.abort("young")
    engine.drain()
    assert len(engine.events["young"]) == heard
    assert engine.tokens("old") == tokens_alone(old)


# Anything at all.

LIMITS = st.fixed_dictionaries(
    {
        "num_pages": st.integers(2, 14),
        "page_size": st.integers(1, 5),
        "max_rows": st.integers(1, 5),
        "look_ahead": st.booleans(),
    }
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 24), st.integers(0, 30)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 8)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(limits=LIMITS, spare=st.integers(0, 12), actions=ACTIONS)
def test_whatever_comes_and_goes_everyone_gets_the_tokens_they_would_get_alone(
    limits, spare, actions
):
    """The engine of the toys checks every step: pages, slots, budgets, spans, progress."""
    engine = ToyEngine(token_budget=limits["max_rows"] + spare, **limits)
    requests: dict[str, Request] = {}
    heard: dict[str, int] = {}  # events of the aborted
    for action, *values in actions:
        if action == "add":
            request = _drawn_request(f"r{len(requests)}", *values)
            try:
                engine.add(request)
            except RequestError:
                continue
            requests[request.request_id] = request
        elif action == "abort" and engine.scheduler.abort(name := f"r{values[0]}"):
            heard[name] = len(engine.events.get(name, []))
            engine.check_conservation()
        elif action == "step":
            for _ in range(values[0]):
                engine.step()
    engine.drain()
    for name, request in requests.items():
        expected = tokens_alone(request)[: heard.get(name)]
        assert engine.tokens(name) == expected
    assert engine.streak <= limits["max_rows"]
    assert engine.stall <= limits["max_rows"] * limits["page_size"]


def _drawn_request(name: str, num_prompt: int, max_tokens: int, stop_at: int) -> Request:
    """With the token it would draw at `stop_at` as a stop token, if it gets that far."""
    plain = make_request(name, num_prompt, max_tokens)
    stops = tuple(tokens_alone(plain)[stop_at : stop_at + 1])
    return make_request(name, num_prompt, max_tokens, stop_token_ids=stops)
