"""From a request body to how its tokens are drawn, every number checked."""

from __future__ import annotations

import math

from jaxserve.errors import RequestError
from jaxserve.request import SamplingParams
from jaxserve.server.limits import Limits, within
from jaxserve.server.listed import allowed_token_ids, bad_words, check_listed, logit_bias
from jaxserve.server.openai import GenerationBody
from jaxserve.server.prompts import check_vocabulary
from jaxserve.server.text import Tokenizer

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: logits divided by less would overflow."""
REPETITION_PENALTIES = (0.01, 100.0)
"""The least and the greatest. Logits times more than this could leave what float32 holds."""


def sampling_params(
    body: GenerationBody,
    tokenizer: Tokenizer,
    limits: Limits,
    top_logprobs: int | None,
) -> SamplingParams:
    """The settings all choices share; max_tokens and seed are still to be filled in."""
    temperature = within("temperature", body.temperature, 0.0, math.inf, default=1.0)
    top_p = within("top_p", body.top_p, 0.0, 1.0, default=1.0)
    if top_p == 0.0:
        raise RequestError("top_p is 0: it must be above 0 and at most 1", param="top_p")
    top_k = within("top_k", body.top_k, -1, 2**31 - 1, default=0)
    stop_ids = body.stop_token_ids or []
    check_vocabulary(stop_ids, "stop_token_ids", limits.vocab_size, param="stop_token_ids")
    eos_ids = () if body.ignore_eos else limits.eos_ids
    sampling = SamplingParams(
        max_tokens=1,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=max(top_k, 0),  # -1 is vLLM's spelling of "all"
        top_p=top_p,
        min_p=within("min_p", body.min_p, 0.0, 1.0, default=0.0),
        presence_penalty=within("presence_penalty", body.presence_penalty, -2.0, 2.0, default=0.0),
        frequency_penalty=within(
            "frequency_penalty", body.frequency_penalty, -2.0, 2.0, default=0.0
        ),
        repetition_penalty=within(
            "repetition_penalty", body.repetition_penalty, *REPETITION_PENALTIES, default=1.0
        ),
        logit_bias=logit_bias(body.logit_bias, limits),
        allowed_token_ids=allowed_token_ids(body.allowed_token_ids, limits),
        bad_words=bad_words(body.bad_words, tokenizer),
        min_tokens=within("min_tokens", body.min_tokens, 0, limits.max_context, default=0),
        stop_token_ids=tuple(dict.fromkeys([*eos_ids, *stop_ids])),
        top_logprobs=top_logprobs,
    )
    check_listed(sampling)
    return sampling
