"""Requests through the scheduler: in, out, and whose turn it is."""

from __future__ import annotations

import math

import pytest
from toy_scheduling import BAD, PAGE, ToyEngine, make_request, next_token, serve, tokens_alone

from jaxserve.errors import RequestError
from jaxserve.pages import PagePool
from jaxserve.policy import OLDEST_SHARE
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Drawn


def make_scheduler(num_pages: int = 9, **limits: int) -> Scheduler:
    sizes = {"max_rows": 4, "token_budget": 16, "max_context": 256}
    return Scheduler(PagePool(num_pages, 16), **{**sizes, **limits})


both_loops = pytest.mark.parametrize("look_ahead", [True, False], ids=["look-ahead", "in turn"])


# Requests in and out.


@both_loops
@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("num_prompt", [1, 4, 5, 8, 9, 32, 33])
def test_a_prompt_whose_last_token_is_computed_by_itself_ends_without_a_token(
    num_prompt, prefix_reuse, look_ahead
):
    """What is left of it after a chunk, or after what is cached, looks like a decode."""
    engine = ToyEngine(token_budget=8, look_ahead=look_ahead, prefix_reuse=prefix_reuse)
    prompt = make_request("a", num_prompt, 3).prompt_ids
    asked = {name: Request(name, prompt, SamplingParams(n)) for name, n in [("a", 3), ("b", 0)]}
    serve(engine, *asked.values())
    serve(engine, make_request("alone", num_prompt, 0))
    assert [e.finish_reason for e in engine.events["b"]] == ["length"]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "needed", "limit"),
    [(150, 1, 151, 128), (100, 100, 200, 128), (128, 1, 129, 128), (1, 128, 129, 128)],
)
def test_a_request_that_could_outgrow_the_pool_is_refused_with_the_numbers(
    num_prompt, max_tokens, needed, limit
):
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match=rf"make {needed}, over the limit of {limit}") as caught:
        scheduler.add(make_request("big", num_prompt, max_tokens))
    assert caught.value.param == "max_tokens"
    assert not scheduler.has_work


def test_a_context_limit_below_the_pool_is_the_one_that_counts():
    with pytest.raises(RequestError, match="over the limit of 64"):
        make_scheduler(max_context=64).add(make_request("a", 60, 5))


def test_who_comes_behind_a_refused_request_is_served_at_once():
    engine = ToyEngine(num_pages=9)
    with pytest.raises(RequestError):
        engine.add(make_request("big", 150, 1))
    serve(engine, make_request("small", 5, 5))
    assert len(engine.steps) <= 8


@both_loops
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 27])
def test_a_request_of_exactly_the_whole_pool_is_served(num_prompt, look_ahead):
    engine = ToyEngine(num_pages=8, look_ahead=look_ahead)
    serve(engine, make_request("whole", num_prompt, 28 - num_prompt))
    assert engine.scheduler.num_preemptions == 0


@both_loops
def test_two_requests_that_do_not_fit_together_take_turns(look_ahead):
    engine = ToyEngine(num_pages=9, page_size=16, look_ahead=look_ahead)
    serve(engine, make_request("a", 70, 8), make_request("b", 70, 8))
    assert engine.scheduler.num_preemptions == 0


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="prompt is empty"):
        make_scheduler().add(Request("a", (), SamplingParams(1)))


def test_an_id_in_flight_is_refused_and_the_first_request_goes_on():
    engine = ToyEngine()
    engine.add(make_request("a", 5, 5))
    with pytest.raises(RequestError, match="'a' is already in flight"):
        engine.add(make_request("a", 9, 9))
    engine.drain()
    assert engine.tokens("a") == tokens_alone(make_request("a", 5, 5))


def test_a_budget_without_a_token_for_every_row_is_refused():
    with pytest.raises(ValueError, match="3 tokens cannot hold a token for each of 4 rows"):
        make_scheduler(token_budget=3)


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (5, 0)])
def test_a_pool_without_a_page_to_give_is_refused(num_pages, page_size):
    with pytest.raises(ValueError, match=f"got {num_pages} of {page_size}"):
        PagePool(num_pages, page_size)


@both_loops
def test_the_last_token_is_the_one_that_reaches_max_tokens(look_ahead):
    requests = [make_request(f"r{n}", 3 + n, n) for n in (1, 2, 5)]
    engine = ToyEngine(look_ahead=look_ahead)
    serve(engine, *requests)
    assert [engine.events[r.request_id][-1].finish_reason for r in requests] == ["length"] * 3
    drawn = sum(span.draws for spans in engine.steps for span in spans)
    assert drawn == 8, "a limit known beforehand must not cost a wasted row"


@both_loops
@pytest.mark.parametrize("place", [0, 3, 9])
def test_a_stop_token_ends_the_request_and_is_its_last_token(place, look_ahead):
    plain = make_request("a", 6, 10)
    stop = tokens_alone(plain)[place]
    engine = ToyEngine(look_ahead=look_ahead)
    serve(engine, make_request("a", 6, 10, stop_token_ids=(stop,)), make_request("b", 6, 10))
    assert engine.tokens("a")[-1] == stop
    assert engine.events["a"][-1].finish_reason == "stop"


@both_loops
def test_logits_that_are_not_finite_end_that_request_alone(look_ahead):
    engine = ToyEngine(look_ahead=look_ahead)
    engine.add(Request("poisoned", (3, BAD, 5), SamplingParams(10)))
    serve(engine, make_request("a", 9, 10), make_request("b", 2, 10))
    (event,) = engine.events["poisoned"]
    assert event.finish_reason == "error" and event.token_id is None
    assert "not finite" in event.message


def test_commit_wants_a_result_for_every_span():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5, 5))
    spans = scheduler.schedule()
    with pytest.raises(ValueError, match="zip"):
        scheduler.commit(spans, [Drawn(1), Drawn(2)])


# Leaving early.


@both_loops
@pytest.mark.parametrize("num_steps", range(12))
def test_an_aborted_request_is_never_heard_of_again(num_steps, look_ahead):
    """Budget 8: waiting at 0, in prefill up to 5, then decoding, always with a step in flight."""
    engine = ToyEngine(num_pages=20, token_budget=8, look_ahead=look_ahead)
    neighbour = make_request("b", 6, 20)
    engine.add(make_request("a", 24, 20), neighbour)
    for _ in range(num_steps):
        engine.step()
    heard = len(engine.events.get("a", []))
    assert engine.scheduler.abort("a")
    engine.check_conservation()
    assert not engine.scheduler.abort("a")
    engine.drain()
    assert len(engine.events.get("a", [])) == heard
    assert engine.tokens("b") == tokens_alone(neighbour)


@both_loops
@pytest.mark.parametrize("num_steps", [0, 1, 3, 6, 9])
def test_an_id_can_be_used_again_right_after_its_abort(num_steps, look_ahead):
    engine = ToyEngine(num_pages=20, token_budget=8, look_ahead=look_ahead)
    engine.add(make_request("a", 24, 20))
    for _ in range(num_steps):
        engine.step()
    engine.scheduler.abort("a")
    engine.events.clear()
    again = Request("a", (9, 8, 7), SamplingParams(6))
    serve(engine, again)


def test_aborting_someone_unknown_does_nothing():
    assert not make_scheduler().abort("nobody")


# Whose turn it is.


def long_prompt_engine() -> ToyEngine:
    """A decodes 200 tokens; B, 3,000 tokens, has just arrived."""
    engine = ToyEngine(num_pages=1000, max_rows=16, token_budget=32)
    engine.add(make_request("A", 4, 200))
    for _ in range(2):
        engine.step()
    engine.add(make_request("B", 3000, 1))
    return engine


def test_a_long_prompt_delays_neither_the_running_nor_the_short():
    engine = long_prompt_engine()
    for _ in range(5):
        engine.step()
    engine.add(make_request("C", 10, 5))
    first_token = {}
    for step in range(1000):
        events = engine.step()
        if len(engine.events["A"]) < 200:
            assert "A" in {event.request_id for event in events}, "a step without a token for A"
        for event in events:
            first_token.setdefault(event.request_id, step)
    assert first_token["C"] <= 2
    assert first_token["B"] > 80
    assert engine.stall == 0


def test_a_stream_of_short_prompts_leaves_the_oldest_prompt_its_share():
    engine = long_prompt_engine()
    engine.step()
    long = engine.sequence("B")
    for step in range(2000):
        if long.num_computed == 3000:
            break
        engine.add(*(make_request(f"{name}{step}", 10, 1) for name in "stuv"))
        before, left = long.num_computed, long.num_pending
        engine.step()
        decodes = sum(
            span.start >= len(span.sequence.request.prompt_ids) for span in engine.steps[-1]
        )
        share = math.ceil((32 - decodes) * OLDEST_SHARE)
        assert long.num_computed - before >= min(left, share)
    assert long.num_computed == 3000
    assert len(engine.events) > 300, "the short ones must not wait for the long one either"


def test_prompts_are_served_before_newer_ones_of_their_length():
    engine = ToyEngine(token_budget=8)
    engine.add(*(make_request(f"r{i}", 16, 1) for i in range(6)))
    engine.drain()
    assert list(engine.events) == [f"r{i}" for i in range(6)]


def test_a_first_token_tells_how_long_its_request_waited_to_be_let_run():
    now = [100.0]
    scheduler = Scheduler(
        PagePool(20, PAGE), max_rows=1, token_budget=8, max_context=40, clock=lambda: now[0]
    )
    scheduler.add(make_request("a", 3, 3), arrived=99.5)
    scheduler.add(make_request("b", 3, 2))
    queued = {}
    while scheduler.has_work:
        now[0] += 1.0
        spans = scheduler.schedule()
        for event in scheduler.commit(spans, [Drawn(7)] * len(spans)):
            queued.setdefault(event.request_id, []).append(event.queued)
    assert queued == {"a": [1.5, 0.0, 0.0], "b": [4.0, 0.0]}


def test_one_token_prompts_start_even_when_decodes_take_nearly_all_of_the_budget():
    engine = ToyEngine(max_rows=4, token_budget=4)
    serve(engine, *(make_request(f"r{i}", 1, 30 - i) for i in range(9)))


def test_the_toy_model_misses_no_change():
    tokens = [5, 1, 4, 4, 2]
    changed = [[*tokens[:i], tokens[i] + 1, *tokens[i + 1 :]] for i in range(5)]
    assert next_token(tokens) not in {next_token(other) for other in [*changed, tokens[::-1]]}
    assert len(make_request("a", PAGE, 1).prompt_ids) == PAGE
