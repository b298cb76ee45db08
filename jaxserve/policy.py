"""What the scheduler asks of a promise: whom to let in, how much to compute, whose turn it is.

The scheduler keeps the books (pages, slots, spans); a policy only answers questions and is told
what happened. `NoPromise` is the policy of an engine that has promised nothing: everyone is let
in, steps are as full as they can be.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from jaxserve.request import RefusalReason, Request
from jaxserve.sequence import Sequence, Span

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


class Policy(Protocol):
    """One promise. `now` is the scheduler's clock, in seconds."""

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

    def observe_step(self, spans: Collection[Span], seconds: float) -> None:
        """A step took this long."""
        ...

    def observe_first_token(self, sequence: Sequence, now: float) -> None:
        """A sequence got its first token."""
        ...

    def observe_finish(self, sequence: Sequence, now: float) -> None:
        """A sequence got its last token."""
        ...


class NoPromise:
    """Lets everyone in and fills every step."""

    def judge(self, sequence: Sequence, load: Load, now: float) -> Refusal | None:
        return None

    def max_tokens(self, request: Request) -> int:
        return request.sampling.max_tokens

    def plan(self, load: Load, now: float) -> Allowance:
        budget = load.token_budget
        batch = all(sequence.is_batch for sequence in load.waiting)
        return Allowance(load.max_rows, budget, budget, OLDEST_SHARE, batch)

    def turn(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        # Admission in order of arrival; among the admitted the least left to compute.
        return (sequence.num_pending if sequence.slot >= 0 else 0,)

    def observe_step(self, spans: Collection[Span], seconds: float) -> None:
        pass

    def observe_first_token(self, sequence: Sequence, now: float) -> None:
        pass

    def observe_finish(self, sequence: Sequence, now: float) -> None:
        pass
