"""Which tokens the next step computes, and what its results mean. No jax, no clock.

There is no prefill mode and no decode mode. Every sequence has tokens known and tokens computed;
a step hands out a budget of tokens until the second number catches up with the first. A sequence
whose last known token is in the step gets a new token drawn.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Seq

from jaxserve.errors import ConfigError, RequestError
from jaxserve.pages import PagePool
from jaxserve.prefix import PrefixReuse
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.sequence import Drawn, Sequence, Span
from jaxserve.swap import Move, SwapCost, SwapSpace

OLDEST_SHARE = 4
"""The oldest unfinished prompt gets at least one in this many of a step's prefill tokens, so that
a stream of short prompts, which otherwise go first, cannot starve a long one."""


class Scheduler:
    """Continuous batching over a pool of pages.

    Order: running decodes, then unfinished prompts, then new requests in order of arrival. When
    pages run out the sequence admitted last gives up its pages and is recomputed later; the one
    admitted first never does, so there is always progress. A step that preempts admits nobody.
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
        """
        check_budget(max_rows, token_budget)
        self.pool = pool
        self.max_rows = max_rows
        self.token_budget = token_budget
        self.max_context = min(max_context, pool.capacity)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self._admission_slack = admission_slack
        self._prefix = PrefixReuse(pool, enabled=prefix_reuse)
        self.swap = swap or SwapSpace(pool, 0, SwapCost(0.0, 0.0))
        self._by_id: dict[str, Sequence] = {}
        self._free_slots = list(range(max_rows - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it could never finish here."""
        needed = len(request.prompt_ids) + request.sampling.max_tokens
        if not request.prompt_ids:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
        if needed > self.max_context:
            raise RequestError(
                f"{len(request.prompt_ids)} prompt tokens and {request.sampling.max_tokens} to "
                f"generate make {needed}, over the limit of {self.max_context}",
                param="max_tokens",
            )
        if request.request_id in self._by_id:
            raise RequestError(f"request id {request.request_id!r} is already in flight")
        sequence = Sequence(request, array("i", request.prompt_ids))
        self._prefix.prepare(sequence)
        self._by_id[request.request_id] = sequence
        self.waiting.append(sequence)

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
        for sequence in tuple(self.running):  # the oldest first
            if sequence.num_pending == 1 and sequence.wants_token:
                self._place(spans, sequence, 1)
        if self.num_preemptions == preemptions:
            for sequence in self._admit():
                if sequence.num_pending == 1:  # restored from the host: it decodes at once
                    self._place(spans, sequence, 1)
        for sequence, num_tokens in self._share(self.token_budget - len(spans)):
            self._place(spans, sequence, num_tokens)
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
            if not span.draws:
                continue
            sequence.num_unseen -= 1
            if not sequence.finished:
                events.append(self._take(sequence, result))
        return events

    def _take(self, sequence: Sequence, drawn: Drawn) -> TokenEvent:
        request = sequence.request
        if drawn.token_id < 0:
            self._finish(sequence)
            message = "the model's logits are not finite (NaN or infinity) for this request"
            return TokenEvent(request.request_id, None, finish_reason="error", message=message)
        sequence.tokens.append(drawn.token_id)
        reason: FinishReason | None = None
        if drawn.token_id in request.sampling.stop_token_ids:
            reason = "stop"
        elif len(sequence.tokens) - sequence.num_prompt >= request.sampling.max_tokens:
            reason = "length"
        if reason is not None:
            self._finish(sequence)
        is_first = len(sequence.tokens) == sequence.num_prompt + 1
        return TokenEvent(
            request.request_id,
            drawn.token_id,
            drawn.logprob,
            drawn.top_logprobs,
            reason,
            num_cached=sequence.num_cached if is_first else 0,
        )

    def _admit(self) -> list[Sequence]:
        """Move waiting sequences to running while rows and pages last; those that moved.

        A sequence is admitted only when its whole prompt fits beside what the prompts already
        admitted still need: prompts that crowd each other out would be preempted half-computed.
        """
        admitted: list[Sequence] = []
        if not self.waiting or not self._free_slots:
            return admitted
        promised = sum(self._prefix.missing(sequence) for sequence in self.running)
        while self.waiting and self._free_slots:
            needed = self._prefix.missing(self.waiting[0])
            slack = self._admission_slack * len(self.running)
            if promised + needed + slack > self.pool.num_free:
                break
            promised += needed
            sequence = self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self.running.append(sequence)
            admitted.append(sequence)
            if sequence.num_swapped:
                self._bring_back(sequence)
        return admitted

    def _bring_back(self, sequence: Sequence) -> None:
        """Restore a sequence from the host. Pages still in the cache need not travel.

        Pages that it was going to share may be somebody's still to compute: then it computes too.
        """
        self._prefix.advance(sequence)
        if self.pool.grow(sequence.pages, sequence.num_swapped):
            self.swap.restore(sequence)
        else:
            self.swap.drop(sequence)

    def _share(self, budget: int) -> list[tuple[Sequence, int]]:
        """Divide the prefill budget: the oldest prompt's share, then the least left to compute."""
        prompts = [
            sequence
            for sequence in self.running
            if sequence.num_pending > 1 or sequence.num_computed == 0
            if self._prefix.advance(sequence)
        ]
        if not prompts or budget <= 0:
            return []
        oldest = prompts[0]
        share = {oldest: min(oldest.num_pending, -(-budget // OLDEST_SHARE))}
        budget -= share[oldest]
        for sequence in sorted(prompts, key=lambda s: s.num_pending):
            more = min(sequence.num_pending - share.get(sequence, 0), budget)
            if more > 0:
                share[sequence] = share.get(sequence, 0) + more
                budget -= more
        return list(share.items())

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
            victim = self.running[-1]
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


def check_budget(max_rows: int, token_budget: int) -> None:
    """Raises ConfigError for a budget that cannot hold a decode of every row."""
    if token_budget < max_rows:
        raise ConfigError(
            f"a step of {token_budget} tokens cannot hold a token for each of {max_rows} rows: "
            "raise the token budget or lower the rows"
        )
