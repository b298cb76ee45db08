"""How likely a prompt's tokens were: against a plain forward pass, and however it is served."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from crowd import MODELS, Events, make_requests, prompts, serve, tokens
from engines import all_logits, make_engine, request, tiny
from test_engine import SERVING

from jaxserve.batch import MAX_TOP_LOGPROBS
from jaxserve.request import Request

NAME = MODELS[0]


def scored(max_tokens: int = 3) -> list[Request]:
    """Prompts of every length that ask for different numbers of alternatives."""
    return [
        request(str(i), prompt, max_tokens, prompt_logprobs=(0, 2, 20)[i % 3])
        for i, prompt in enumerate(prompts(1))
    ]


def check(asked: list[Request], got: Events) -> None:
    """Held to the log-softmax of the model's logits."""
    for each in asked:
        prompt, top = list(each.prompt_ids), each.sampling.prompt_logprobs
        first, *rest = got[each.request_id]
        assert not any(event.prompt_logprobs for event in rest)
        assert len(first.prompt_logprobs) == len(prompt) - 1
        expected = np.asarray(jax.nn.log_softmax(all_logits(tiny(NAME), prompt)))
        for before, score in enumerate(first.prompt_logprobs):
            row = expected[before]
            assert score.logprob == pytest.approx(row[prompt[before + 1]], abs=1e-4)
            best = np.sort(row)[::-1][:top]
            np.testing.assert_allclose([v for _, v in score.top_logprobs], best, atol=1e-4)
            assert all(row[t] == pytest.approx(v, abs=1e-4) for t, v in score.top_logprobs)


@pytest.mark.parametrize(("how", "drive"), SERVING.values(), ids=SERVING)
def test_prompts_are_scored_as_a_plain_forward_pass_would(how, drive: Callable[..., Events]):
    """Among others that ask for nothing, whose tokens do not change by it."""
    others = make_requests()[:4]
    engine = make_engine(NAME, **how)
    got = drive(engine, [*others[:2], *scored(), *others[2:]])
    check(scored(), got)
    unscored = [request(each.request_id, each.prompt_ids, 3) for each in scored()]
    plain = serve(make_engine(NAME), [*others, *unscored])
    for key, events in plain.items():
        assert tokens(got[key]) == tokens(events)
        assert not any(event.prompt_logprobs for event in events)


@pytest.mark.parametrize("look_ahead", [True, False])
def test_a_request_for_no_tokens_gets_its_prompt_scored_and_nothing_else(look_ahead):
    asked = [*scored(max_tokens=0), request("plain", [5, 6, 7], 0)]
    got = serve(make_engine(NAME, look_ahead=look_ahead), [*asked, *make_requests()[:3]])
    check(asked[:-1], got)
    for each in asked:
        (event,) = got[each.request_id]
        assert (event.token_id, event.finish_reason) == (None, "length")
    assert got["plain"][0].prompt_logprobs == ()


def test_a_prompt_may_fill_the_context_if_no_token_is_asked_for():
    prompt = np.random.default_rng(0).integers(1, 320, 512).tolist()
    (event,) = serve(make_engine(NAME), [request("0", prompt, 0, prompt_logprobs=0)])["0"]
    assert len(event.prompt_logprobs) == 511


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_what_is_cached_is_scored_all_the_same(length):
    """C02: pages of a prompt that was served before have keys and values, but no logits."""
    engine = make_engine(NAME)
    prompt = prompts(9)[7][:length]
    cold = serve(engine, [request("0", prompt, 1, prompt_logprobs=1)])["0"]
    serve(engine, [request("1", prompt, 1)])
    (warm,) = serve(engine, [request("2", prompt, 1, prompt_logprobs=1)])["2"]
    check([request("2", prompt, 1, prompt_logprobs=1)], {"2": [warm]})
    assert warm.num_cached == 0 and tokens(cold) == [warm.token_id]
    again = serve(engine, [request("3", prompt, 1)])["3"][0]
    assert again.num_cached == length - 1, "others still share what others computed"


def test_a_step_that_cannot_tell_refuses_who_asks_and_nobody_else():
    engine = make_engine(NAME)
    launch = engine.executor.launch

    def without(spans):
        launched = launch(spans)
        blank = {**vars(launched.output), "prompt": ()}
        return type(launched)(launched.spans, type(launched.output)(**blank), launched.started)

    engine.executor.launch = without
    got = serve(engine, [scored()[3], request("plain", [1, 2], 3)])
    (event,) = got[scored()[3].request_id]
    assert event.finish_reason == "error" and "step function" in event.message
    assert len(tokens(got["plain"])) == 3


def test_alternatives_are_the_most_there_may_be():
    (event,) = serve(make_engine(NAME), [request("0", [4, 5], 1, prompt_logprobs=20)])["0"]
    assert len(event.prompt_logprobs[0].top_logprobs) == MAX_TOP_LOGPROBS
