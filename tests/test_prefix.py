"""Prefix reuse: one copy of what is shared, found only once computed, and never a wrong token."""

from __future__ import annotations

import pytest
from toy_scheduling import PAGE, ToyEngine, tokens_alone

from jaxserve.request import Request, SamplingParams

both_loops = pytest.mark.parametrize("look_ahead", [True, False], ids=["look-ahead", "in turn"])


def ask(name: str, prompt: list[int], max_tokens: int = 4, salt: str = "") -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens), cache_salt=salt)


def numbers(count: int, start: int = 0) -> list[int]:
    return [(start * 131 + 7 * i) % 900 for i in range(count)]


def run(engine: ToyEngine, *requests: Request) -> dict[str, int]:
    """Serve them together to their ends; the prompt tokens each found computed."""
    engine.add(*requests)
    engine.drain()
    for request in requests:
        assert engine.tokens(request.request_id) == tokens_alone(request)
    return {
        request.request_id: engine.events[request.request_id][0].num_cached for request in requests
    }


@both_loops
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 16, 17])
def test_a_prompt_that_is_wholly_cached_computes_its_last_token(length, look_ahead):
    engine = ToyEngine(prefix_reuse=True, look_ahead=look_ahead)
    prompt = numbers(length)
    assert run(engine, ask("cold", prompt)) == {"cold": 0}
    assert run(engine, ask("warm", prompt)) == {"warm": length - 1}
    assert sum(span.num_tokens for span in engine.steps[-4 - look_ahead]) <= 1


@both_loops
def test_prompts_share_exactly_the_pages_they_have_in_common(look_ahead):
    engine = ToyEngine(prefix_reuse=True, look_ahead=look_ahead)
    common = numbers(3 * PAGE + 2)
    run(engine, ask("first", [*common, 900, 901, 902]))
    assert run(engine, ask("second", [*common, *[903] * 5])) == {"second": 3 * PAGE}
    assert run(engine, ask("other", numbers(20, start=1))) == {"other": 0}


def test_generated_pages_are_found_by_the_next_turn_of_a_conversation():
    engine = ToyEngine(prefix_reuse=True)
    first = ask("first", numbers(10), max_tokens=11)
    run(engine, first)
    turn = [*first.prompt_ids, *tokens_alone(first), 5, 6, 7]
    # The last token drawn was never computed: 20 of 21 are in the cache, 5 full pages.
    assert run(engine, ask("next", turn)) == {"next": 20}


def test_salts_keep_tenants_apart():
    engine = ToyEngine(prefix_reuse=True)
    prompt = numbers(20)
    run(engine, ask("a", prompt, salt="alice"))
    assert run(engine, ask("b", prompt, salt="bob")) == {"b": 0}
    assert run(engine, ask("c", prompt, salt="alice")) == {"c": 19}


@both_loops
def test_a_hundred_requests_at_once_hold_one_copy_of_a_shared_prompt(look_ahead):
    engine = ToyEngine(
        num_pages=1 + 500 + 100 * 3,
        max_rows=100,
        token_budget=128,
        prefix_reuse=True,
        look_ahead=look_ahead,
    )
    system = numbers(2000)
    requests = [ask(f"user{i}", [*system, 901, i], max_tokens=3) for i in range(100)]
    engine.add(*requests)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.scheduler.pool.num_live)
    assert most <= 2000 // PAGE + 100 * 2
    for request in requests:
        assert engine.tokens(request.request_id) == tokens_alone(request)
    computed = sum(span.num_tokens for spans in engine.steps for span in spans)
    assert computed <= 2000 + 100 * (2 + 3)


@both_loops
@pytest.mark.parametrize("length", [14, 15, 16])
def test_samples_of_one_prompt_share_it_and_copy_its_last_page(length, look_ahead):
    engine = ToyEngine(prefix_reuse=True, look_ahead=look_ahead)
    prompt = numbers(length)
    found = run(engine, *(ask(f"s{i}", prompt, max_tokens=9) for i in range(5)))
    assert sorted(found.values()) == [0, *[length - 1] * 4]
    copies = [span.copy for spans in engine.steps for span in spans if span.copy is not None]
    assert len(copies) == 4
    assert len({target for _, target in copies}) == 4


def test_a_page_is_not_found_before_the_step_that_computes_it_has_landed():
    engine = ToyEngine(prefix_reuse=True, token_budget=8)
    prompt = numbers(40)
    engine.add(ask("first", prompt))
    engine.step()  # launched, not landed
    engine.add(ask("second", prompt))
    sequence = engine.sequence("second")
    assert not sequence.pages
    engine.drain()
    assert engine.tokens("second") == tokens_alone(ask("x", prompt))


@both_loops
def test_when_the_one_that_computes_for_others_is_aborted_the_next_takes_over(look_ahead):
    engine = ToyEngine(prefix_reuse=True, token_budget=8, look_ahead=look_ahead)
    prompt = numbers(60)
    requests = [ask(name, prompt) for name in "abc"]
    engine.add(*requests)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.abort("a")
    engine.drain()
    assert engine.tokens("b") == engine.tokens("c") == tokens_alone(requests[1])


def test_cached_pages_are_evicted_oldest_use_first_and_from_the_end_of_a_prefix():
    engine = ToyEngine(num_pages=1 + 12, prefix_reuse=True)
    old, new = numbers(16, start=1), numbers(16, start=2)
    run(engine, ask("old", old, max_tokens=1))
    run(engine, ask("new", new, max_tokens=1))
    run(engine, ask("big", numbers(23, start=3), max_tokens=1))  # 6 of 12 pages: 2 are evicted
    pool = engine.scheduler.pool
    assert pool.num_live == 0 and pool.num_free == 12
    assert run(engine, ask("new again", new, max_tokens=1)) == {"new again": 15}
    assert run(engine, ask("old again", old, max_tokens=1))["old again"] < 15
