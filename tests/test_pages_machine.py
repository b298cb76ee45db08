"""Pages under anything that can happen to them: after every event the books are exact."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import ClassVar
from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from toy_scheduling import ToyEngine, tokens_alone

from jaxserve.policy import Allowance, Load, NoPromise
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Sequence

EVENTS = 10_000
SELDOM = 10  # whatever is counted happens hundreds of times; a change elsewhere shifts the traces
TRACES = settings(
    max_examples=260,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,  # the same traces every time, so that what they reach can be asserted
    database=None,
    suppress_health_check=list(HealthCheck),
)
FAMILIES = st.integers(0, 2)
SALTS = st.sampled_from(["", "", "alice", "bob"])
CLASSES = st.sampled_from(["interactive", "interactive", "batch"])
LENGTHS = st.integers(1, 30)  # around the ends of pages, and several pages
MAX_TOKENS = st.integers(1, 16)
PICKS = st.integers(0, 1 << 16)


def prompt(family: int, length: int) -> tuple[int, ...]:
    """Prompts of one family are beginnings of each other."""
    return tuple((family * 131 + 7 * i) % 900 for i in range(length))


@cache
def answer(request: Request) -> list[int]:
    return tokens_alone(request)


class Traffic(RuleBasedStateMachine):
    """Requests come, share, are aborted, preempted, swapped and finish, over a pool that is often
    too small for them.

    Attributes:
        counts: over all traces: rules run, and what they led to.
    """

    counts: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_pages=st.integers(13, 40),
        token_budget=st.integers(8, 40),
        look_ahead=st.booleans(),
        prefix_reuse=st.sampled_from([True, True, True, False]),
        swap_pages=st.sampled_from([0, 9, 100]),
        admission_slack=st.integers(0, 1),
    )
    def start(self, look_ahead: bool, swap_pages: int, **settings: int) -> None:
        self.engine = ToyEngine(look_ahead=look_ahead, swap_pages=swap_pages, **settings)
        self.look_ahead = look_ahead
        self.swap_pages = swap_pages
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    @rule(family=FAMILIES, length=LENGTHS, max_tokens=MAX_TOKENS, salt=SALTS, kind=CLASSES)
    def submit(self, family: int, length: int, max_tokens: int, salt: str, kind: str) -> None:
        self._add("submits", prompt(family, length), SamplingParams(max_tokens), salt, kind)

    @rule(family=FAMILIES, length=LENGTHS, stop_at=st.integers(0, 10), salt=SALTS)
    def submit_one_that_stops(self, family: int, length: int, stop_at: int, salt: str) -> None:
        """Its answer has a stop token in it, which nobody knows before it is drawn."""
        ids = prompt(family, length)
        stop = answer(Request("", ids, SamplingParams(16)))[stop_at]
        sampling = SamplingParams(16, stop_token_ids=(stop,))
        self._add("submits", ids, sampling, salt, "interactive")

    @rule(family=FAMILIES, length=LENGTHS, max_tokens=MAX_TOKENS, n=st.integers(2, 4))
    def fork(self, family: int, length: int, max_tokens: int, n: int) -> None:
        """Samples of one prompt: they share its full pages and copy its last one."""
        for _ in range(n):
            sampling = SamplingParams(max_tokens)
            self._add("forks", prompt(family, length), sampling, "", "interactive")

    @rule(pick=PICKS)
    def abort(self, pick: int) -> None:
        if not (alive := [*self.scheduler.running, *self.scheduler.waiting]):
            return
        name = alive[pick % len(alive)].request.request_id
        assert self.scheduler.abort(name) and not self.scheduler.abort(name)
        self.aborted.add(name)
        self.counts["aborts"] += 1

    @precondition(lambda self: len(self.scheduler.running) > 1)
    @rule(pick=PICKS)
    def preempt(self, pick: int) -> None:
        """Any but the oldest, wherever it is: amid its prompt, or with a token in flight.

        Within a step, as the scheduler itself does it: that step admits nobody. The scheduler
        does it for one that computes in its place; here perhaps nobody does.
        """
        policy, victims = self.scheduler.policy, self.scheduler.running[1:]

        def preempt_first(load: Load, now: float) -> Allowance:
            self.scheduler._preempt(victims[pick % len(victims)])
            return NoPromise.plan(policy, load, now)

        with patch.object(policy, "plan", preempt_first):
            self._step(may_idle=True)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.scheduler.running)
    @rule(pick=PICKS)
    def finish(self, pick: int) -> None:
        """Step until one that runs now has ended."""
        sequence = self.scheduler.running[pick % len(self.scheduler.running)]
        for _ in range(2000):
            if sequence.finished:
                return
            self._step()
        raise AssertionError("it never ended")

    @invariant()
    def the_books_are_exact(self) -> None:
        self.engine.check_conservation()
        running = self.scheduler.running
        assert set(self.scheduler._prefix._claims.values()) <= set(running)
        saved = sum(map(self._num_saved, self.scheduler.waiting))
        assert self.scheduler.swap._free + saved == self.swap_pages
        salts: dict[int, set[str]] = {}
        for sequence in running:
            for page in sequence.pages:
                salts.setdefault(page, set()).add(sequence.request.cache_salt)
        assert all(len(each) == 1 for each in salts.values()), "tenants share a page"
        self.counts["rules"] += 1
        self.counts["shared"] += sum(len(s.pages) for s in running) > len(salts)

    def teardown(self) -> None:
        """Everybody gets the tokens they would have got alone, whatever happened around them."""
        self.engine.drain()
        for name, request in self.requests.items():
            got = self.engine.tokens(name)
            assert got == (answer(request)[: len(got)] if name in self.aborted else answer(request))
        swaps = self.scheduler.swap.num_swaps
        self.counts["swapped out"] += swaps
        self.counts["recomputed"] += self.scheduler.num_preemptions - swaps

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    def _num_saved(self, sequence: Sequence) -> int:
        """Pages it has on the host."""
        return self.scheduler.pool.pages_for(sequence.num_swapped)

    def _add(
        self, counted: str, ids: tuple[int, ...], sampling: SamplingParams, salt: str, kind: str
    ) -> None:
        name = f"r{len(self.requests)}"
        request = Request(name, ids, sampling, cache_salt=salt, service_class=kind)
        self.requests[name] = request
        self.engine.add(request)
        self.counts[counted] += 1

    def _step(self, *, may_idle: bool = False) -> None:
        counts, scheduler = self.counts, self.scheduler
        preemptions, saved = (
            scheduler.num_preemptions,
            [s for s in scheduler.waiting if s.num_swapped],
        )
        events = self.engine.step(may_idle=may_idle)
        counts["steps ahead" if self.look_ahead else "steps in turn"] += 1
        counts["preemptions"] += scheduler.num_preemptions - preemptions
        counts["swapped in"] += sum(sequence.slot >= 0 for sequence in saved)
        counts["copies"] += sum(span.copy is not None for span in self.engine.steps[-1])
        counts["stops"] += sum(event.finish_reason == "stop" for event in events)
        counts["hits"] += sum(event.num_cached > 0 for event in events)


def test_after_every_event_each_page_is_free_or_held_by_exactly_as_many_as_the_pool_says():
    Traffic.counts.clear()
    run_state_machine_as_test(Traffic, settings=TRACES)
    assert Traffic.counts["rules"] >= EVENTS
    rare = {name: count for name, count in Traffic.counts.items() if count < SELDOM}
    assert not rare and len(Traffic.counts) == 14, f"the traces seldom got to {rare}"
