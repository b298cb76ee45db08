"""What a client asked for and what the engine answers, in tokens. Knows neither text nor arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
ServiceClass = Literal["interactive", "batch"]
RefusalReason = Literal["late", "full", "deadline"]

MAX_TOP_LOGPROBS = 20
"""Most alternatives a step reports per token: the compiled step always has room for these."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when drawing ends. Already validated, all defaults resolved.

    Attributes:
        max_tokens: tokens to generate at most, >= 1.
        temperature: 0 is greedy. Otherwise >= 1e-5.
        top_k: keep the k likeliest tokens. 0 keeps all.
        top_p: keep the likeliest tokens that together reach this probability. 1 keeps all.
        min_p: drop tokens below min_p times the likeliest one's probability. 0 keeps all.
        seed: u64. With the position of a token it decides that token's draw, nothing else does.
        stop_token_ids: end the generation; the token itself counts as output. EOS tokens are
            among them unless the client asked to ignore EOS.
        top_logprobs: alternatives to report for each token, 0 to MAX_TOP_LOGPROBS; None reports
            no log-probabilities at all.
        presence_penalty: taken off the logit of every token drawn before. 0 takes nothing.
        frequency_penalty: likewise, for each time it was drawn.
        repetition_penalty: what the logits of tokens drawn before or in the prompt are divided by
            where above 0, multiplied by where below. 1 changes nothing.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def has_rules(self) -> bool:
        """Whether logits are changed before a token is drawn."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_ids: at least one token, each in [0, V).
        sampling: how to continue it.
        cache_salt: computed pages are shared only between requests with the same salt.
        service_class: batch runs in what interactive leaves over, and is preempted first.
        tenant: who asks; each gets a fair share while others wait.
        deadline: seconds from its arrival after which nobody wants the answer; None is never.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    service_class: ServiceClass = "interactive"
    tenant: str = ""
    deadline: float | None = None


class TokenEvent(msgspec.Struct, frozen=True):
    """One generated token, or the end of a request.

    Attributes:
        request_id: whose.
        token_id: the token, or None if the request ended without one (abort, error).
        logprob: natural log-probability of the token under the untempered model, if asked for.
        top_logprobs: (token id, log-probability) of the likeliest tokens, likeliest first.
        finish_reason: set on a request's last event, else None.
        num_cached: on a request's first token: prompt tokens that need not be computed.
        queued: on a request's first token: seconds from its arrival until it was admitted.
        message: why, when finish_reason is "error".
        refusal: set if the request was not let in, or was given up for its deadline.
        retry_after: with it: seconds after which the request would be let in.
    """

    request_id: str
    token_id: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    queued: float = 0.0
    message: str = ""
    refusal: RefusalReason | None = None
    retry_after: float = 0.0
