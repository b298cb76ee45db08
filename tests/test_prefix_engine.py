"""A cache hit does not change an answer: the same requests cold and warm on a real model."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from crowd import SAMPLING, Events, assert_same, both_loops
from crowd import serve as serve_all
from engines import NUM_PAGES, drain, make_engine, request

from jaxserve.request import Request

FAMILY = "llama-untied"
PROMPT = [int(t) for t in np.random.default_rng(3).integers(3, 320, 80)]


def serve(engine, name: str, prompt: list[int], max_tokens: int):
    engine.add(request(name, prompt, max_tokens, top_logprobs=3))
    events = drain(engine)[name]
    tokens = [event.token_id for event in events]
    logprobs = np.array([[p for _, p in event.top_logprobs] for event in events])
    return tokens, logprobs, events[0].num_cached


@pytest.mark.parametrize("max_tokens", [1, 20])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_gives_the_same_cold_and_warm(length, max_tokens):
    engine = make_engine(FAMILY, num_pages=NUM_PAGES)
    cold, cold_logprobs, cached = serve(engine, "cold", PROMPT[:length], max_tokens)
    assert cached == 0
    for name in ("warm", "warm again"):
        warm, logprobs, cached = serve(engine, name, PROMPT[:length], max_tokens)
        assert cached == length - 1
        assert warm == cold
        np.testing.assert_allclose(logprobs, cold_logprobs, atol=1e-4)


def test_the_hit_rate_counts_each_prompt_once():
    engine = make_engine(FAMILY, num_pages=NUM_PAGES, token_budget=24)
    for name in ("cold", "warm", "warm again"):
        serve(engine, name, PROMPT[:40], 5)
    assert engine.counters.asked_tokens == 3 * 40
    assert engine.counters.found_tokens == 2 * 39
    assert engine.counters.rows == 1


def test_hits_of_every_kind_give_what_a_fresh_engine_gives():
    prompts = {
        "53": PROMPT[:53],
        "53 and more": [*PROMPT[:53], 5, 6, 7, 8, 9, 10, 11],
        "40 and others": [*PROMPT[:40], *range(100, 120)],
        "hit ends inside a chunk": [*PROMPT[:70], 3, 4],
    }
    warm = make_engine(FAMILY, num_pages=NUM_PAGES, token_budget=24)
    answers = {name: serve(warm, name, prompt, 12) for name, prompt in prompts.items()}
    answers["turn"] = serve(warm, "turn", [*PROMPT[:53], *answers["53"][0], 9, 9], 12)
    prompts["turn"] = [*PROMPT[:53], *answers["53"][0], 9, 9]
    assert [answers[name][2] for name in prompts] == [0, 48, 32, 48, 64]
    for name, prompt in prompts.items():
        tokens, logprobs, _ = serve(make_engine(FAMILY, num_pages=NUM_PAGES), name, prompt, 12)
        assert answers[name][0] == tokens
        np.testing.assert_allclose(answers[name][1], logprobs, atol=1e-4)


def test_pages_left_by_an_abort_or_a_stop_token_serve_the_next_request():
    fresh, _, _ = serve(make_engine(FAMILY, num_pages=NUM_PAGES), "x", PROMPT[:40], 20)
    engine = make_engine(FAMILY, num_pages=NUM_PAGES)
    engine.add(request("aborted", PROMPT[:40], 20))
    for _ in range(7):
        engine.step()
    assert engine.abort("aborted")
    drain(engine)
    engine.add(request("stopped", PROMPT[:40], 20, stop_token_ids=(fresh[9],)))
    drain(engine)
    tokens, _, cached = serve(engine, "after", PROMPT[:40], 20)
    assert (tokens, cached) == (fresh, 39)


def related_requests() -> list[Request]:
    """Prompts that begin alike, samples of one prompt, greedy and seeded."""
    lengths = (33, 40, 48, 48, 48, 70)
    hot = {**SAMPLING, "seed": 7}
    return [
        request(f"r{i}", [*PROMPT[:length], *range(9, 9 + i % 2)], 44, **(hot if i % 3 else {}))
        for i, length in enumerate(lengths)
    ]


@functools.cache
def each_alone() -> Events:
    events: Events = {}
    for each in related_requests():
        engine = make_engine(FAMILY, prefix_reuse=False, look_ahead=False)
        events |= serve_all(engine, [each])
    return events


WAYS = {
    "enough pages": {},
    "recomputed": {"usable_pages": 10},
    "swapped": {"usable_pages": 10, "swap_pages": 99},
}


@both_loops
@pytest.mark.parametrize("token_budget", [9, 64])
@pytest.mark.parametrize("prefix_reuse", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_the_same_in_every_way_of_serving_them(
    way, prefix_reuse, token_budget, look_ahead
):
    engine = make_engine(
        FAMILY,
        prefix_reuse=prefix_reuse,
        token_budget=token_budget,
        look_ahead=look_ahead,
        **WAYS[way],
    )
    got = serve_all(engine, related_requests())
    assert_same(got, each_alone())
    assert any(events[0].num_cached for events in got.values()) == prefix_reuse
    assert (engine.scheduler.num_preemptions > 0) == (way != "enough pages")
    assert (engine.scheduler.swap.num_swaps > 0) == (way == "swapped")
