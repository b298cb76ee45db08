"""Which tokens the next step computes, and what its results mean. No jax.

There is no prefill mode and no decode mode. Every sequence has tokens known and tokens computed;
a step hands out a budget of tokens until the second number catches up with the first. A sequence
whose last known token is in the step gets a new token drawn.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from llguidance import LLMatcher

from jaxserve.deadlines import Deadlines
from jaxserve.errors import RequestError
from jaxserve.limits import check_budget, check_request, may_run, with_limit
from jaxserve.pages import PagePool
from jaxserve.policy import Allowance, Load, NoPromise, Policy, Refusal
from jaxserve.prefix import PrefixReuse
from jaxserve.request import NOTHING_LEFT, Request, TokenEvent
from jaxserve.results import (
    not_finite,
    not_pooled,
    not_scored,
    nothing_left,
    off_constraint,
    overdue,
    prompt_only,
    reason_to_stop,
    token_event,
)
from jaxserve.sequence import Drawn, Sequence, Span
from jaxserve.shares import share_out
from jaxserve.swap import Move, SwapCost, SwapSpace


class Scheduler:
    """Continuous batching over a pool of pages.

    Order: running decodes, then unfinished prompts, then new requests; among prompts and among
    requests the policy says whose turn it is. When pages run out the sequence admitted last gives
    up its pages and comes back later, batch class first; of the interactive ones the one admitted
    first never does, so there is always progress. A step that preempts for pages admits nobody.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_rows: int,
        token_budget: int,
        max_context: int,
        prefix_reuse: bool = True,
        swap: SwapSpace | None = None,
        admission_slack: int = 1,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for a budget that cannot hold a decode of every row.

        Args:
            pool: the pages; nobody else takes from it.
            max_rows: most sequences running at once.
            token_budget: most tokens in a step, at least max_rows.
            max_context: most tokens a sequence may hold; lowered to what the pool can hold.
            prefix_reuse: sequences that begin alike share pages.
            swap: where preempted sequences may be kept; None recomputes them.
            admission_slack: free pages to leave for each running sequence when admitting another.
                Without it a pool that is full at admission preempts as soon as anyone grows.
            policy: None promises nothing: everyone is let in, steps are as full as can be.
            clock: seconds, never going back.
        """
        check_budget(max_rows, token_budget)
        self.pool = pool
        self.max_rows = max_rows
        self.token_budget = token_budget
        self.max_context = min(max_context, pool.capacity)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.policy = policy or NoPromise()
        self.clock = clock
        self._deadlines = Deadlines()
        self._admission_slack = admission_slack
        self._prefix = PrefixReuse(pool, enabled=prefix_reuse)
        self.swap = swap or SwapSpace(pool, 0, SwapCost(0.0, 0.0))
        self._by_id: dict[str, Sequence] = {}
        self._free_slots = list(range(max_rows - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def load(self) -> Load:
        return Load(self.running, self.waiting, self.max_rows, self.token_budget)

    def add(
        self,
        request: Request,
        *,
        arrived: float | None = None,
        matcher: LLMatcher | None = None,
    ) -> Refusal | None:
        """Queue a request, unless the policy refuses it now.

        Raises RequestError if it could never finish here, ValueError for a constraint without its
        matcher.

        Args:
            request: it.
            arrived: when it came, by the scheduler's clock; None is now.
            matcher: a new one of its constraint, if it has one. It becomes the scheduler's.
        """
        if (matcher is None) != (request.sampling.constraint is None):
            raise ValueError("a constraint and its matcher go together")
        now = self.clock()
        request = with_limit(request, self.policy.max_tokens(request))
        check_request(request, self.max_context)
        if request.request_id in self._by_id:
            raise RequestError(f"request id {request.request_id!r} is already in flight")
        sequence = Sequence(request, array("i", request.prompt_ids))
        sequence.arrived = now if arrived is None else arrived
        sequence.matcher = matcher
        self._prefix.prepare(sequence)
        sequence.num_uncached = self._prefix.uncached(sequence)
        refusal = self.policy.judge(sequence, self.load, now)
        if refusal is not None:
            return refusal
        self._by_id[request.request_id] = sequence
        self.waiting.append(sequence)
        self._deadlines.add(sequence)
        return None

    def expire(self) -> list[TokenEvent]:
        """Give up the sequences whose deadline has passed."""
        for sequence in (passed := self._deadlines.passed(self.clock())):
            self._finish(sequence)
        return [overdue(sequence.request) for sequence in passed]

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its pages. False if there is none of that id."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return False
        self._finish(sequence)
        return True

    def schedule(self) -> tuple[Span, ...]:
        """Choose the spans of the next step, and count them as computed."""
        spans: list[Span] = []
        preemptions = self.num_preemptions
        now = self.clock()
        allowance = self.policy.plan(self.load, now)
        if allowance.decode:
            self._decode_all(spans, allowance)
        if self.num_preemptions == preemptions:
            for sequence in self._admit(allowance, now):
                if sequence.num_pending == 1:  # restored from the host: it decodes at once
                    self._place(spans, sequence, 1)
        budget = min(allowance.prefill_tokens, self.token_budget - len(spans))
        prompts = [
            sequence
            for sequence in self.running
            if sequence.num_pending > 1 or sequence.num_computed == 0
            if may_run(sequence, allowance) and self._prefix.advance(sequence)
        ]
        turn = partial(self.policy.turn, now=now)
        for sequence, num_tokens in share_out(prompts, budget, allowance, turn):
            self._place(spans, sequence, num_tokens)
        if not spans and not allowance.decode:
            self._decode_all(spans, allowance)  # there was nobody to leave them out for
        if spans:
            self.policy.observe_launch(spans, now)
        return tuple(spans)

    def take_moves(self) -> tuple[Move, ...]:
        """Pages to move before the step just scheduled does anything else."""
        return self.swap.take_moves()

    def commit(self, spans: Seq[Span], drawn: Seq[Drawn]) -> list[TokenEvent]:
        """Take in the results of a step, one entry of `drawn` for each span.

        Steps are committed in the order they were scheduled.
        """
        events = []
        for span, result in zip(spans, drawn, strict=True):
            sequence = span.sequence
            if sequence.slot >= 0:  # a sequence preempted meanwhile has no pages to show
                self._prefix.landed(sequence, span.stop)
            if result.prompt_logprobs:
                first = span.start + 1
                sequence.prompt_logprobs.update(enumerate(result.prompt_logprobs, first))
            if result.pooled is not None:
                # One that lost its pages begins again; nobody else's are counted in.
                before = sequence.pooled if span.start and span.pools == "mean" else None
                sequence.pooled = result.pooled if before is None else before + result.pooled
            if not span.draws:
                continue
            sequence.num_unseen -= 1
            if not sequence.finished:
                events.append(self._take(sequence, result))
        return events

    def _take(self, sequence: Sequence, drawn: Drawn) -> TokenEvent:
        if sequence.first_token is None and (event := self._take_prompt(sequence)):
            return event
        if drawn.token_id < 0:
            self._finish(sequence)
            banned = drawn.token_id == NOTHING_LEFT
            return nothing_left(sequence.request) if banned else not_finite(sequence.request)
        matcher = sequence.matcher
        # A matcher that has failed takes an end token all the same.
        if matcher and (not matcher.consume_token(drawn.token_id) or matcher.is_error()):
            self._finish(sequence)
            return off_constraint(sequence.request, matcher.get_error())
        sequence.tokens.append(drawn.token_id)
        if sequence.first_token is None:
            sequence.first_token = self.clock()
            self.policy.observe_first_token(sequence, sequence.first_token)
        reason = reason_to_stop(sequence)
        if reason is not None:
            self._finish(sequence)
            self.policy.observe_finish(sequence, self.clock())
        return token_event(sequence, drawn, reason)

    def _take_prompt(self, sequence: Sequence) -> TokenEvent | None:
        """What a prompt just computed ends with, if nothing is to be drawn after it."""
        sampling = sequence.request.sampling
        scored = len(sequence.prompt_logprobs) >= sequence.num_prompt - 1
        if sampling.prompt_logprobs is not None and not scored:
            self._finish(sequence)
            return not_scored(sequence.request)
        if sampling.pooling is not None and sequence.pooled is None:
            self._finish(sequence)
            return not_pooled(sequence.request)
        if sampling.max_tokens > 0:
            return None
        sequence.first_token = self.clock()
        self.policy.observe_first_token(sequence, sequence.first_token)
        self._finish(sequence)
        return prompt_only(sequence)

    def _admit(self, allowance: Allowance, now: float) -> list[Sequence]:
        """Move waiting sequences to running while rows and pages last; those that moved.

        A sequence is admitted only when its whole prompt fits beside what the prompts already
        admitted still need: prompts that crowd each other out would be preempted half-computed.
        """
        admitted: list[Sequence] = []
        if not self.waiting or (self._is_full(allowance) and self._newest_batch() is None):
            return admitted
        promised = sum(map(self._prefix.missing, self.running))
        for sequence in sorted(self.waiting, key=partial(self.policy.turn, now=now)):
            if not may_run(sequence, allowance):
                continue
            needed = self._prefix.missing(sequence)
            while self._is_full(allowance) or promised + needed > self._num_spare:
                victim = self._newest_batch()
                if allowance.batch or sequence.is_batch or victim is None:
                    return admitted
                self._preempt(victim)  # the batch class makes way
                promised = sum(map(self._prefix.missing, self.running))
            promised += needed
            self.waiting.remove(sequence)
            sequence.slot = self._free_slots.pop()
            sequence.admitted = sequence.admitted or now
            self.running.append(sequence)
            admitted.append(sequence)
            if sequence.num_swapped:
                self._bring_back(sequence)
        return admitted

    @property
    def _num_spare(self) -> int:
        """Free pages, without those that running sequences will soon grow into."""
        return self.pool.num_free - self._admission_slack * len(self.running)

    def _is_full(self, allowance: Allowance) -> bool:
        return len(self.running) >= allowance.running_limit or not self._free_slots

    def _newest_batch(self) -> Sequence | None:
        return next((s for s in reversed(self.running) if s.is_batch), None)

    def _bring_back(self, sequence: Sequence) -> None:
        """Restore a sequence from the host. Pages still in the cache need not travel.

        Pages that it was going to share may be somebody's still to compute: then it computes too.
        """
        self._prefix.advance(sequence)
        if self.pool.grow(sequence.pages, sequence.num_swapped):
            self.swap.restore(sequence)
        else:
            self.swap.drop(sequence)

    def _decode_all(self, spans: list[Span], allowance: Allowance) -> None:
        """Put a token of every running sequence that is ready for one into the step."""
        for sequence in tuple(self.running):  # the oldest first
            ready = sequence.num_pending == 1 and sequence.wants_token
            if ready and may_run(sequence, allowance):
                self._decode(spans, sequence)

    def _decode(self, spans: list[Span], sequence: Sequence) -> None:
        """Put the sequence's last known token into the step."""
        start = sequence.num_computed
        if start == len(sequence.pages) * self.pool.page_size or sequence.slot < 0:
            self._place(spans, sequence, 1)
            return
        # Most steps of most sequences: nothing to find, to copy or to grow.
        spans.append(Span(sequence, start, start + 1, start == len(sequence.tokens), True))
        sequence.num_computed = start + 1
        sequence.num_unseen += 1

    def _place(self, spans: list[Span], sequence: Sequence, num_tokens: int) -> None:
        """Put the sequence's next tokens into the step: as many as find a page."""
        if sequence.slot < 0:
            return
        copy = self._prefix.copy_tail(sequence)
        start = sequence.num_computed
        stop = min(start + num_tokens, sequence.num_known)
        stop = self._make_room(spans, sequence, stop)
        if stop == start:
            return
        draws = stop == sequence.num_known
        spans.append(Span(sequence, start, stop, stop > len(sequence.tokens), draws, copy))
        sequence.num_computed = stop
        sequence.num_unseen += draws

    def _make_room(self, spans: list[Span], sequence: Sequence, num_tokens: int) -> int:
        """Give `sequence` pages for `num_tokens`, preempting younger sequences until they fit.

        Sequences that already have a span in this step are never preempted. A sequence that finds
        nobody to preempt takes the pages there are and keeps what it holds: giving that up would
        help nobody, for whoever is older and needs it can take it.

        Returns:
            Tokens its pages have room for, at most `num_tokens`.
        """
        while self.pool.room(sequence.pages) < num_tokens:
            victim = self._newest_batch() or self.running[-1]
            if victim is sequence or any(span.sequence is victim for span in spans):
                num_tokens = self.pool.room(sequence.pages)
                break
            self._preempt(victim)
        self.pool.grow(sequence.pages, num_tokens)
        return num_tokens

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages; it goes first in line, to be restored or recomputed."""
        self.swap.save(sequence)
        self._stop_running(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """Let go of everything. A step in flight may still compute a row of it: see PagePool."""
        sequence.finished = True
        sequence.matcher = None
        del self._by_id[sequence.request.request_id]
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            self.swap.drop(sequence)
            return
        self._stop_running(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self._prefix.drop(sequence)
        self.running.remove(sequence)
        self.pool.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
