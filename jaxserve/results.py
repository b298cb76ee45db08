"""What a step's results mean for a request, as events."""

from __future__ import annotations

import numpy as np

from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.sequence import Drawn, Sequence


def reason_to_stop(sequence: Sequence) -> FinishReason | None:
    """Whether the sequence's newest token was its last one, and why."""
    sampling = sequence.request.sampling
    if sequence.tokens[-1] in sampling.stop_token_ids:
        return "stop"
    if len(sequence.tokens) - sequence.num_prompt >= sampling.max_tokens:
        return "length"
    return None


def token_event(sequence: Sequence, drawn: Drawn, reason: FinishReason | None) -> TokenEvent:
    """The sequence's newest token."""
    is_first = len(sequence.tokens) == sequence.num_prompt + 1
    return TokenEvent(
        sequence.request.request_id,
        drawn.token_id,
        drawn.logprob,
        drawn.top_logprobs,
        reason,
        num_cached=sequence.num_cached if is_first else 0,
        prompt_logprobs=tuple(sequence.prompt_logprobs.values()) if is_first else (),
        queued=sequence.admitted - sequence.arrived if is_first else 0.0,
    )


def prompt_only(sequence: Sequence) -> TokenEvent:
    """The only event of a request for no tokens."""
    pooled = sequence.pooled
    if pooled is not None:
        if not np.isfinite(pooled).all():
            return not_finite(sequence.request)
        if sequence.request.sampling.pooling == "mean":
            pooled = pooled / np.float32(sequence.num_prompt)
    return TokenEvent(
        sequence.request.request_id,
        None,
        finish_reason="length",
        num_cached=sequence.num_cached,
        prompt_logprobs=tuple(sequence.prompt_logprobs.values()),
        pooled=b"" if pooled is None else pooled.tobytes(),
        queued=sequence.admitted - sequence.arrived,
    )


def not_scored(request: Request) -> TokenEvent:
    """The last event of a request for what the server's step function does not tell."""
    message = "the step function of this server tells no log-probabilities of prompts"
    return TokenEvent(request.request_id, None, finish_reason="error", message=message)


def not_pooled(request: Request) -> TokenEvent:
    """The last event of a request for what the server's step function does not tell."""
    message = "the step function of this server tells no hidden states of prompts"
    return TokenEvent(request.request_id, None, finish_reason="error", message=message)


def not_finite(request: Request) -> TokenEvent:
    """The last event of a request whose logits no token can be drawn from."""
    message = "the model's logits are not finite (NaN or infinity) for this request"
    return TokenEvent(request.request_id, None, finish_reason="error", message=message)


def impossible(request: Request, message: str) -> TokenEvent:
    """The only or last event of a request for what cannot be."""
    return TokenEvent(
        request.request_id, None, finish_reason="error", message=message, refusal="impossible"
    )


def nothing_left(request: Request) -> TokenEvent:
    """The last event of a request that has banned every token."""
    limits = "allowed_token_ids, bad_words and min_tokens"
    if request.sampling.constraint is not None:
        limits = f"its schema or grammar together with {limits}"
    return impossible(request, f"what the request allows ({limits}) leaves no token to draw")


def off_constraint(request: Request, error: str) -> TokenEvent:
    """The last event of a request whose constraint gave up, or was not kept to by the step."""
    return impossible(request, f"the answer cannot be held to its schema or grammar: {error}")


def overdue(request: Request) -> TokenEvent:
    """The last event of a request whose deadline has passed."""
    message = f"the deadline of {request.deadline:g} s has passed"
    return TokenEvent(
        request.request_id, None, finish_reason="abort", message=message, refusal="deadline"
    )
