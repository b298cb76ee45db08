"""Pooled hidden states of prompts: against a plain forward pass, and however they are served."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import dense_llama
import numpy as np
import pytest
from crowd import MODELS, Events, make_requests, prompts, serve, tokens
from engines import make_engine, request, tiny
from test_engine import SERVING

from jaxserve.request import Request

NAME = MODELS[0]


def asked() -> list[Request]:
    """Prompts of every length, each pooled in both ways."""
    return [
        request(f"{i} {pooling}", prompt, 0, pooling=pooling)
        for i, prompt in enumerate(prompts(1))
        for pooling in ("last", "mean")
    ]


def hidden(prompt: tuple[int, ...]) -> np.ndarray:
    """f64[T, E], final hidden states."""
    config, params = tiny(NAME).decoder.config, tiny(NAME).params
    stream = dense_llama.residual_stream(config, params, prompt)[-1]
    return dense_llama.rms_norm(stream, params["norm"], config.norm_eps)


def check(requests: list[Request], got: Events) -> None:
    for each in requests:
        (event,) = got[each.request_id]
        assert (event.token_id, event.finish_reason) == (None, "length")
        states = hidden(each.prompt_ids)
        expected = states[-1] if each.sampling.pooling == "last" else states.mean(axis=0)
        np.testing.assert_allclose(np.frombuffer(event.pooled, np.float32), expected, atol=2e-4)


@pytest.mark.parametrize(("how", "drive"), SERVING.values(), ids=SERVING)
def test_prompts_are_pooled_as_a_plain_forward_pass_would(how, drive: Callable[..., Events]):
    """Among others that ask for nothing, whose tokens do not change by it."""
    others = make_requests()[:6]
    got = drive(make_engine(NAME, **how), [*others[:3], *asked(), *others[3:]])
    check(asked(), got)
    for key, events in serve(make_engine(NAME), others).items():
        assert tokens(got[key]) == tokens(events)
        assert not any(event.pooled for event in got[key])


@pytest.mark.parametrize("length", [15, 16, 17, 33, 48])
def test_what_is_cached_is_pooled_all_the_same(length):
    """C02: the mean needs hidden states that the cache has not; the last one does not."""
    engine = make_engine(NAME)
    prompt = prompts(9)[7][:length]
    serve(engine, [request("before", prompt, 1)])
    both = [request(pooling, prompt, 0, pooling=pooling) for pooling in ("last", "mean")]
    got = serve(engine, both)
    check(both, got)
    assert got["last"][0].num_cached == length - 1
    assert got["mean"][0].num_cached == 0


def test_a_step_that_cannot_tell_refuses_who_asks_and_nobody_else():
    engine = make_engine(NAME)
    launch = engine.executor.launch

    def without(prepared):
        launched = launch(prepared)
        output = launched.output.replace(pooled=())
        return dataclasses.replace(launched, output=output)

    engine.executor.launch = without
    got = serve(engine, [*asked()[:2], request("plain", [1, 2], 3)])
    for each in asked()[:2]:
        (event,) = got[each.request_id]
        assert event.finish_reason == "error" and "step function" in event.message
    assert len(tokens(got["plain"])) == 3
