"""A crowd of requests of awkward lengths, and what each of them must get."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
from engines import make_engine, request
from toy_scheduling import check_conservation

from jaxserve.engine import Engine
from jaxserve.request import Request, TokenEvent

MODELS = ["llama-untied", "gemma3-hybrid"]  # the second has windows shorter than the prompts
LENGTHS = (1, 15, 16, 17, 33, 64, 65, 130)
SAMPLING = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.05}

Events = dict[str, list[TokenEvent]]

both_models = pytest.mark.parametrize("name", MODELS)
both_loops = pytest.mark.parametrize("look_ahead", [True, False], ids=["look-ahead", "in turn"])


def prompts(seed: int) -> list[list[int]]:
    """A prompt of each length; token 0 is in none of them."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 320, length).tolist() for length in LENGTHS]


def make_requests(max_tokens: int = 20) -> list[Request]:
    """Greedy and seeded ones by turns."""
    both = []
    for i, (first, second) in enumerate(zip(prompts(1), prompts(2), strict=True)):
        both.append(request(f"greedy {len(first)}", first, max_tokens, top_logprobs=3))
        hot = {**SAMPLING, "seed": 2**40 + i, "top_logprobs": 3}
        both.append(request(f"seeded {len(second)}", second, max_tokens, **hot))
    return both


def drain(engine: Engine, events: Events | None = None) -> Events:
    """Run to the end, checking after every step that no page is lost or shared by mistake."""
    events = {} if events is None else events
    for _ in range(5000):
        if not engine.has_work:
            break
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        check_conservation(engine.scheduler)
    assert not engine.has_work, "the engine made no progress"
    assert engine.scheduler.pool.num_live == 0
    return events


def serve(engine: Engine, requests: Sequence[Request]) -> Events:
    for each in requests:
        engine.add(each)
    return drain(engine)


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def assert_same(got: Events, expected: Events, *, atol: float = 1e-4) -> None:
    """The same tokens and reasons, and log-probabilities to `atol`."""
    assert got.keys() == expected.keys()
    for key, events in expected.items():
        assert tokens(got[key]) == tokens(events), key
        assert [e.finish_reason for e in got[key]] == [e.finish_reason for e in events]
        for ours, theirs in zip(got[key], events, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=atol)
            ours_top, theirs_top = dict(ours.top_logprobs), dict(theirs.top_logprobs)
            for token in ours_top.keys() & theirs_top.keys():
                assert ours_top[token] == pytest.approx(theirs_top[token], abs=atol)


@functools.cache
def alone(name: str, kv: str = "auto") -> Events:
    """Every request served by an engine of its own, step by step."""
    events: Events = {}
    for each in make_requests():
        events |= serve(make_engine(name, look_ahead=False, kv=kv), [each])
    return events
