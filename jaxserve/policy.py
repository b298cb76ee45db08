"""What the scheduler asks of a promise: whom to let in, how much to compute, whose turn it is.

The scheduler keeps the books (pages, slots, spans); a policy only answers questions and is told
what happened. `NoPromise` is the policy of an engine that has promised nothing: everyone is let
in, steps are as full as they can be.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.drain import Drain
from jaxserve.request import RefusalReason, Request
from jaxserve.sequence import Sequence, Span

QUEUE_FULL = "the queue is full"
MARGIN = 0.1
"""Share of a step's expected duration, before its end, by which the next one is scheduled at the
latest: expectations err."""
OLDEST_SHARE = 0.25
"""Of a step's prefill tokens, for the oldest unfinished prompt: a stream of short prompts, which
otherwise go first, cannot starve a long one."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the scheduler has in hand. The lists are its own: read, never change.

    Attributes:
        running: admitted sequences, those admitted first in front.
        waiting: the others.
        max_rows: most sequences a step can hold.
        token_budget: most tokens.
    """

    running: Collection[Sequence]
    waiting: Collection[Sequence]
    max_rows: int
    token_budget: int


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the next step may do.

    Attributes:
        running_limit: most sequences running at once.
        prefill_tokens: most tokens of prompts, all together; decodes come first.
        chunk: most tokens of one prompt.
        oldest_share: of a step's prefill tokens, for the prompt admitted first.
        batch: whether the batch class may run.
        decode: whether running sequences get their tokens.
    """

    running_limit: int
    prefill_tokens: int
    chunk: int
    oldest_share: float
    batch: bool = True
    decode: bool = True


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in.

    Attributes:
        reason: for metrics.
        message: for people.
        retry_after: seconds after which it would be.
    """

    reason: RefusalReason
    message: str
    retry_after: float


@dataclass(frozen=True, slots=True)
class Report:
    """A policy's own numbers, for metrics.

    Attributes:
        running_limit: sequences that may run; 0 if there is no limit but memory.
        rung: of the degradation ladder, 0 to 2.
        refused: requests so far, by reason.
        predicted_seconds: of the step in flight. prediction_error: relative, on average.
        step_factors: what the device's roofline is multiplied by, by term.
    """

    running_limit: int = 0
    rung: int = 0
    refused: Mapping[RefusalReason, int] = field(default_factory=dict)
    predicted_seconds: float = 0.0
    prediction_error: float = 0.0
    step_factors: Mapping[str, float] = field(default_factory=dict)


def schedule_at(device_free: float, now: float, host_seconds: float) -> float:
    """When to schedule the next step: late, for whoever comes until then can be in it, but not so
    late that the device waits.

    Args:
        device_free: when the step that begins now is expected to end. now: the time.
        host_seconds: that scheduling and launching take.
    """
    return device_free - max(host_seconds, MARGIN * (device_free - now))


class Policy(Protocol):
    """One promise. `now` is the scheduler's clock, in seconds.

    Attributes:
        device_free: when the device will be done with every step it was given; 0 if nobody can
            tell.
    """

    device_free: float

    def judge(self, sequence: Sequence, load: Load, now: float) -> Refusal | None:
        """Whether to let a new request in.

        Args:
            sequence: it; not in `load` yet.
            load: everyone else.
            now: the time.
        """
        ...

    def max_tokens(self, request: Request) -> int:
        """Tokens a new request may generate: what it asks for, or fewer."""
        ...

    def plan(self, load: Load, now: float) -> Allowance:
        """What the next step may do."""
        ...

    def turn(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        """A sort key: prompts with a smaller one go first, of equal ones the earlier."""
        ...

    def observe_launch(self, spans: Collection[Span], now: float) -> None:
        """The device was given a step, behind those it has."""
        ...

    def observe_step(self, spans: Collection[Span], seconds: float, now: float) -> None:
        """The oldest step it was given is done, and took this long."""
        ...

    def observe_first_token(self, sequence: Sequence, now: float) -> None:
        """A sequence got its first token."""
        ...

    def observe_finish(self, sequence: Sequence, now: float) -> None:
        """A sequence got its last token."""
        ...

    def report(self) -> Report:
        """How it stands."""
        ...


class NoPromise:
    """Lets everyone in whom the queue has room for, and fills every step."""

    device_free = 0.0

    def __init__(self, *, max_queue: int | None = None, max_tokens_cap: int | None = None) -> None:
        """Args:
        max_queue: most requests that wait; None is any number.
        max_tokens_cap: most tokens of an answer; None is as many as are asked for.
        """
        self._max_queue = max_queue
        self._max_tokens_cap = max_tokens_cap
        self._drain = Drain()
        self._num_refused = 0

    def judge(self, sequence: Sequence, load: Load, now: float) -> Refusal | None:
        if self._max_queue is None or len(load.waiting) < self._max_queue:
            return None
        self._num_refused += 1
        return Refusal("full", QUEUE_FULL, math.ceil(len(load.waiting) / self._drain.rate(now)))

    def max_tokens(self, request: Request) -> int:
        return min(request.sampling.max_tokens, self._max_tokens_cap or sys.maxsize)

    def plan(self, load: Load, now: float) -> Allowance:
        budget = load.token_budget
        batch = all(sequence.is_batch for sequence in load.waiting)
        return Allowance(load.max_rows, budget, budget, OLDEST_SHARE, batch)

    def turn(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        # Admission in order of arrival; among the admitted the least left to compute.
        return (sequence.num_pending if sequence.slot >= 0 else 0,)

    def observe_launch(self, spans: Collection[Span], now: float) -> None:
        pass

    def observe_step(self, spans: Collection[Span], seconds: float, now: float) -> None:
        pass

    def observe_first_token(self, sequence: Sequence, now: float) -> None:
        pass

    def observe_finish(self, sequence: Sequence, now: float) -> None:
        self._drain.note(now)

    def report(self) -> Report:
        return Report(refused={"full": self._num_refused})
