"""A request in flight, and what one step does to it. No jax, no clock."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec
import numpy as np
from llguidance import LLMatcher

from jaxserve.request import Pooling, PromptLogprob, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in flight. The one mutable record; nobody but the scheduler changes it.

    Attributes:
        request: what was asked.
        tokens: prompt and output known to the host, i32.
        pages: its cache pages in order, i32.
        num_computed: tokens whose keys and values are in the cache once every launched step ran.
        num_unseen: tokens drawn by launched steps that the host has not seen.
        slot: place in per-sequence device state while running, else -1.
        finished: no further token of it counts.
        num_preemptions: how often it lost its pages.
        labels: digests of the full pages of `tokens`, by which equal pages find each other.
        tail_label: digest of the prompt's last page, full or not.
        num_labelled: pages at the front that can be found by their label.
        claims: it computes its pages on behalf of every sequence that begins alike.
        num_swapped: tokens whose keys and values are saved in host memory.
        num_cached: prompt tokens it found computed when it was first admitted.
        num_uncached: prompt tokens to compute, as it looked when it came.
        arrived: when it came, in seconds of the scheduler's clock.
        admitted: when it was first given a slot.
        first_token: when its first token was seen; None before.
        prompt_logprobs: of its prompt's tokens, by position, as far as they are computed.
        pooled: f32[E], of its prompt's hidden states as far as they are computed, if asked for.
        matcher: what its text may go on with, after the output in `tokens`; None leaves it free.
    """

    request: Request
    tokens: array[int]
    pages: array[int] = field(default_factory=lambda: array("i"))
    num_computed: int = 0
    num_unseen: int = 0
    slot: int = -1
    finished: bool = False
    num_preemptions: int = 0
    labels: list[bytes] = field(default_factory=list)
    tail_label: bytes = b""
    num_labelled: int = 0
    claims: bool = False
    num_swapped: int = 0
    num_cached: int = 0
    num_uncached: int = 0
    arrived: float = 0.0
    admitted: float = 0.0
    first_token: float | None = None
    prompt_logprobs: dict[int, PromptLogprob] = field(default_factory=dict)
    pooled: np.ndarray | None = None
    matcher: LLMatcher | None = None

    # Asked of every sequence several times a step: each is written out, for a property that asks
    # others takes several times as long.

    @property
    def num_known(self) -> int:
        """Tokens there are, those included that only the device knows yet."""
        return len(self.tokens) + self.num_unseen

    @property
    def num_pending(self) -> int:
        return len(self.tokens) + self.num_unseen - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether all it needs is the step that draws its next token."""
        pending = len(self.tokens) + self.num_unseen - self.num_computed
        return pending == 1 and self.num_computed > 0

    @property
    def is_batch(self) -> bool:
        return self.request.service_class == "batch"

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_drawn(self) -> int:
        return len(self.tokens) + self.num_unseen - len(self.request.prompt_ids)

    @property
    def wants_token(self) -> bool:
        """Whether it may still draw: its last token needs no step of its own. One for no tokens
        draws once all the same, for that computes the end of its prompt."""
        request = self.request
        drawn = len(self.tokens) + self.num_unseen - len(request.prompt_ids)
        return drawn < (request.sampling.max_tokens or 1) and not self.finished


class Span(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a sequence, computed in one step.

    Attributes:
        feed: the span's token is one the host has not seen; the device has it.
        draws: the span ends at the sequence's last token, so a new token is drawn.
        copy: (from, to): a page to copy before the step writes anything.
    """

    # A struct, like Drawn and TokenEvent: one is made for every row of every step, and making a
    # frozen dataclass takes several times as long.

    sequence: Sequence
    start: int
    stop: int
    feed: bool
    draws: bool
    copy: tuple[int, int] | None = None

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted of it, and were not told before."""
        sequence = self.sequence
        wanted = sequence.request.sampling.prompt_logprobs is not None
        return wanted and self.start < sequence.num_prompt - 1 and sequence.first_token is None

    @property
    def pools(self) -> Pooling | None:
        """What is wanted of the span's hidden states; the last one only where the prompt ends."""
        kind = self.sequence.request.sampling.pooling
        return kind if kind == "mean" or self.draws else None


class Drawn(msgspec.Struct, frozen=True):
    """What a step reports for one span: a token, and log-probabilities where asked for.

    `token_id` is `NOT_FINITE` or `NOTHING_LEFT` where none could be drawn.
    `prompt_logprobs` are of the prompt tokens from the span's second one on, and of the one that
    follows it. `pooled`, f32[E], is of its hidden states: their sum, or the last one.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    pooled: np.ndarray | None = None
