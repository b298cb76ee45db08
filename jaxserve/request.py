"""What a client asked for and what the engine answers, in tokens. Knows neither text nor arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
ServiceClass = Literal["interactive", "batch"]
Pooling = Literal["last", "mean"]
RefusalReason = Literal["late", "full", "deadline", "impossible"]
ConstraintKind = Literal["json_schema", "regex", "lark"]

NOT_FINITE, NOTHING_LEFT = -1, -2
"""In place of a token: the model's logits are of no use, or every token is banned."""
MAX_TOP_LOGPROBS = 20
"""Most alternatives a step reports per token: the compiled step always has room for these."""
MAX_LISTED_TOKENS = 1024
"""Most tokens that `logit_bias`, or `allowed_token_ids`, may list."""
MAX_BAD_WORDS = 128
"""Most sequences of tokens that are not to be drawn."""
MAX_BAD_WORD_TOKENS = 16
MAX_WAITING_STOPS = 128
"""Most `stop_token_ids` that can be kept from coming before `min_tokens`."""
MAX_CONSTRAINT_BYTES = 2**18
"""Of a schema, an expression or a grammar, as UTF-8."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The language that the text of an answer is in. The answer ends where a sentence of it does.

    Attributes:
        kind: what `text` is: a JSON schema, a regular expression that the whole answer matches, or
            a grammar in Lark's notation or llama.cpp's (GBNF).
        text: at most MAX_CONSTRAINT_BYTES.
        whitespace: of a JSON schema: a regular expression for what may be between two tokens of
            the JSON. "" is nothing; None leaves the choice to the server.
    """

    kind: ConstraintKind
    text: str
    whitespace: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when drawing ends. Already validated, all defaults resolved.

    Attributes:
        max_tokens: tokens to generate at most; 0 computes the prompt only.
        temperature: 0 is greedy. Otherwise >= 1e-5.
        top_k: keep the k likeliest tokens. 0 keeps all.
        top_p: keep the likeliest tokens that together reach this probability. 1 keeps all.
        min_p: drop tokens below min_p times the likeliest one's probability. 0 keeps all.
        seed: u64. With the position of a token it decides that token's draw, nothing else does.
        stop_token_ids: end the generation; the token itself counts as output. EOS tokens are
            among them unless the client asked to ignore EOS.
        top_logprobs: alternatives to report for each token, 0 to MAX_TOP_LOGPROBS; None reports
            no log-probabilities at all.
        prompt_logprobs: the same for each token of the prompt but the first, which has none.
        pooling: report the prompt's final hidden states as one vector, with `max_tokens` 0.
        presence_penalty: taken off the logit of every token drawn before. 0 takes nothing.
        frequency_penalty: likewise, for each time it was drawn.
        repetition_penalty: what the logits of tokens drawn before or in the prompt are divided by
            where above 0, multiplied by where below. 1 changes nothing.
        logit_bias: (token id, what is added to its logit), each id once.
        allowed_token_ids: the only tokens that may come; None allows all.
        bad_words: sequences of 1 to MAX_BAD_WORD_TOKENS tokens that the output never contains.
        min_tokens: none of `stop_token_ids` comes before so many tokens.
        constraint: what the text has to be like; None leaves it free.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    constraint: Constraint | None = None

    @property
    def has_rules(self) -> bool:
        """Whether logits are changed before a token is drawn."""
        # Asked of every row in every step.
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.bad_words
            or self.min_tokens
            or self.allowed_token_ids is not None
        )

    def listed_tokens(self) -> dict[int, tuple[float, bool]]:
        """Tokens with a rule of their own: what is added to their logits, and whether they have to
        wait for `min_tokens`. Where only some are allowed, those."""
        bias = dict(self.logit_bias)
        bias |= {word[0]: -math.inf for word in self.bad_words if len(word) == 1}
        waiting = set(self.stop_token_ids) if self.min_tokens else set()
        listed = self.allowed_token_ids
        if listed is None:
            listed = tuple(sorted(waiting | bias.keys()))
        return {token: (bias.get(token, 0.0), token in waiting) for token in listed}


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


class PromptLogprob(msgspec.Struct, frozen=True):
    """How likely a token of a prompt was after those before it, and which were likeliest."""

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


class TokenEvent(msgspec.Struct, frozen=True):
    """One generated token, or the end of a request.

    Attributes:
        request_id: whose.
        token_id: the token, or None if the request ended without one (abort, error, or nothing
            was to be generated: then the reason is "length").
        logprob: natural log-probability of the token under the untempered model, if asked for.
        top_logprobs: (token id, log-probability) of the likeliest tokens, likeliest first.
        finish_reason: set on a request's last event, else None.
        num_cached: on a request's first token: prompt tokens that need not be computed.
        prompt_logprobs: on a request's first event, if asked for: of every prompt token but the
            first, in order.
        pooled: on the only event of a request with `pooling`: f32[E] in this machine's byte order.
        queued: on a request's first token: seconds from its arrival until it was admitted.
        message: why, when finish_reason is "error".
        refusal: set if the request was not let in, was given up for its deadline, or asks for what
            cannot be.
        retry_after: with it: seconds after which the request would be let in.
    """

    request_id: str
    token_id: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    pooled: bytes = b""
    queued: float = 0.0
    message: str = ""
    refusal: RefusalReason | None = None
    retry_after: float = 0.0
