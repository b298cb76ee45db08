"""The engine on tiny models: the oracle, and the same tokens whatever else is going on."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from crowd import (
    MODELS,
    SAMPLING,
    Events,
    alone,
    assert_same,
    both_loops,
    both_models,
    drain,
    make_requests,
    prompts,
    serve,
    tokens,
)
from engines import all_logits, make_engine, request, tiny
from toy_scheduling import check_conservation

from jaxserve.engine import Engine
from jaxserve.request import Request

MARGIN = 1e-3


# The oracle.


@both_models
def test_greedy_tokens_and_logprobs_are_those_of_a_plain_forward_pass(name):
    certain = 0
    for each in make_requests():
        if each.sampling.temperature:
            continue
        events = alone(name)[each.request_id]
        text = [*each.prompt_ids, *tokens(events)]
        logits = all_logits(tiny(name), text)[len(each.prompt_ids) - 1 : -1]
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        best = np.sort(logits, axis=-1)
        for i, event in enumerate(events):
            assert event.logprob == pytest.approx(logprobs[i, event.token_id], abs=1e-4)
            if best[i, -1] - best[i, -2] > MARGIN:
                certain += 1
                assert event.token_id == np.argmax(logits[i])
    assert certain > 120, "too many near ties for the comparison to prove anything"


# Invariance.


def all_at_once(engine: Engine, requests: list[Request]) -> Events:
    return serve(engine, requests)


def in_reverse(engine: Engine, requests: list[Request]) -> Events:
    return serve(engine, requests[::-1])


def one_by_one(engine: Engine, requests: list[Request]) -> Events:
    """A request every third step, so that prompts arrive amid decodes."""
    events: Events = {}
    for each in requests:
        engine.add(each)
        for _ in range(3):
            for event in engine.step():
                events.setdefault(event.request_id, []).append(event)
            check_conservation(engine.scheduler)
    return drain(engine, events)


SERVING = {
    "in a crowd": ({}, all_at_once),
    "in turn with the device": ({"look_ahead": False}, all_at_once),
    "in small chunks": ({"token_budget": 9}, all_at_once),
    "the last one first": ({}, in_reverse),
    "arriving on the way": ({}, one_by_one),
    "arriving on the way, in small chunks": ({"token_budget": 9}, one_by_one),
    "short of pages": ({"usable_pages": 14}, all_at_once),
    "short of pages, in turn": ({"usable_pages": 14, "look_ahead": False}, in_reverse),
    "swapped to the host": ({"usable_pages": 14, "swap_pages": 99}, all_at_once),
    "swapped to the host, in turn": (
        {"usable_pages": 13, "swap_pages": 99, "look_ahead": False},
        in_reverse,
    ),
    "swapped to the host amid prefill": (
        {"usable_pages": 12, "swap_pages": 99, "token_budget": 9},
        all_at_once,
    ),
    "short of pages, in small chunks": ({"usable_pages": 12, "token_budget": 9}, all_at_once),
}


@both_models
@pytest.mark.parametrize(("how", "drive"), SERVING.values(), ids=SERVING)
def test_everyone_gets_the_tokens_they_would_get_alone(name, how, drive: Callable[..., Events]):
    engine = make_engine(name, **how)
    got = drive(engine, make_requests())
    assert_same(got, alone(name))
    if "usable_pages" in how:
        assert engine.scheduler.num_preemptions > 0
    assert (engine.scheduler.swap.num_swaps > 0) == ("swap_pages" in how)


@both_models
def test_copies_of_a_request_among_others_all_get_its_tokens(name):
    original = make_requests()[9]  # seeded, 33 tokens
    copies = [Request(f"copy {i}", original.prompt_ids, original.sampling) for i in range(5)]
    got = serve(make_engine(name), [*copies[:2], *make_requests()[:6], *copies[2:]])
    expected = alone(name)[original.request_id]
    for copy in copies:
        assert tokens(got[copy.request_id]) == tokens(expected)


@both_models
def test_forced_along_the_solo_tokens_a_crowd_sees_the_same_logprobs(name):
    """Compares the numbers at every position, not the luck of the argmax."""
    prompt = prompts(7)[4]
    solo = serve(make_engine(name), [request("solo", prompt, 24, top_logprobs=20)])["solo"]
    text = [*prompt, *tokens(solo)]
    forced = [
        request(str(i), text[: len(prompt) + i], 1, top_logprobs=20) for i in range(len(solo))
    ]
    got = serve(make_engine(name), [*forced, *make_requests()])
    for i, event in enumerate(solo):
        (there,) = got[str(i)]
        values, expected = ([v for _, v in e.top_logprobs] for e in (there, event))
        np.testing.assert_allclose(values, expected, atol=1e-4)
        assert dict(there.top_logprobs)[event.token_id] == pytest.approx(event.logprob, abs=1e-4)


# Ends.


@both_loops
def test_max_tokens_is_met_exactly(look_ahead):
    requests = [request(str(n), prompts(4)[n], n) for n in range(1, 8)]
    got = serve(make_engine(MODELS[0], look_ahead=look_ahead), requests)
    assert [len(got[str(n)]) for n in range(1, 8)] == list(range(1, 8))
    assert all(got[str(n)][-1].finish_reason == "length" for n in range(1, 8))
    assert all(e.finish_reason is None for n in range(1, 8) for e in got[str(n)][:-1])


@both_loops
def test_a_stop_token_ends_a_request_and_disturbs_nobody(look_ahead):
    stopped = []
    for i, each in enumerate(make_requests()):
        stop = tokens(alone(MODELS[0])[each.request_id])[i]
        sampling = {"max_tokens": 20, "temperature": each.sampling.temperature}
        stops = (319, stop) if i % 3 else ()
        hot = SAMPLING if each.sampling.temperature else {}
        sampling = {**hot, "seed": each.sampling.seed, "stop_token_ids": stops}
        stopped.append(request(each.request_id, each.prompt_ids, 20, **sampling))
    got = serve(make_engine(MODELS[0], look_ahead=look_ahead), stopped)
    for each in stopped:
        expected = tokens(alone(MODELS[0])[each.request_id])
        hits = [i for i, token in enumerate(expected) if token in each.sampling.stop_token_ids]
        events = got[each.request_id]
        assert tokens(events) == (expected[: hits[0] + 1] if hits else expected)
        assert events[-1].finish_reason == ("stop" if hits else "length")


# Leaving early.


@both_loops
@pytest.mark.parametrize("num_steps", [0, 3, 20], ids=["waiting", "in prefill", "decoding"])
def test_an_aborted_request_leaves_nothing_behind(num_steps, look_ahead):
    engine = make_engine(MODELS[0], token_budget=16, look_ahead=look_ahead)
    gone = request("gone", prompts(5)[7], 50)
    neighbours = make_requests()[:5]
    for each in (gone, *neighbours):
        engine.add(each)
    events: Events = {}
    for _ in range(num_steps):
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    heard = len(events.get("gone", []))
    assert (heard > 0) == (num_steps == 20)
    assert engine.abort("gone") and not engine.abort("gone")
    check_conservation(engine.scheduler)
    drain(engine, events)
    assert len(events.pop("gone", [])) == heard
    assert_same(events, {each.request_id: alone(MODELS[0])[each.request_id] for each in neighbours})


@both_loops
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_aborted_id_can_be_used_again_at_once(num_steps, look_ahead):
    engine = make_engine(MODELS[0], look_ahead=look_ahead)
    again = make_requests()[7]
    engine.add(request(again.request_id, prompts(6)[5], 30, temperature=1.0, seed=4))
    for _ in range(num_steps):
        engine.step()
    assert engine.abort(again.request_id)
    got = serve(engine, [again])
    assert_same(got, {again.request_id: alone(MODELS[0])[again.request_id]})
