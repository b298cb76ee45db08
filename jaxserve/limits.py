"""What cannot be served: by size, by class, by time."""

from __future__ import annotations

import dataclasses

from jaxserve.errors import ConfigError, RequestError
from jaxserve.policy import Allowance
from jaxserve.request import Request
from jaxserve.sequence import Sequence


def check_budget(max_rows: int, token_budget: int) -> None:
    """Raises ConfigError for a budget that cannot hold a decode of every row."""
    if token_budget < max_rows:
        raise ConfigError(
            f"a step of {token_budget} tokens cannot hold a token for each of {max_rows} rows: "
            "raise the token budget or lower the rows"
        )


def check_request(request: Request, max_context: int) -> None:
    """Raises RequestError for a request that could never finish within `max_context` tokens."""
    num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if not num_prompt:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    if num_prompt + max_tokens > max_context:
        raise RequestError(
            f"{num_prompt} prompt tokens and {max_tokens} to generate make "
            f"{num_prompt + max_tokens}, over the limit of {max_context}",
            param="max_tokens",
        )


def may_run(sequence: Sequence, allowance: Allowance) -> bool:
    """Whether the sequence's class has a part in the next step."""
    return allowance.batch or not sequence.is_batch


def with_limit(request: Request, max_tokens: int) -> Request:
    """The request, asking for no more than `max_tokens`."""
    if max_tokens >= request.sampling.max_tokens:
        return request
    sampling = dataclasses.replace(request.sampling, max_tokens=max_tokens)
    return dataclasses.replace(request, sampling=sampling)
