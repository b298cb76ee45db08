"""The loop body: where the host side and the device side meet.

    schedule -> launch (pack, dispatch) -> collect the step before -> commit -> events

The step just launched runs while the one before it is committed and the next one is scheduled:
the device never waits for the host, as long as a step takes longer than the host's work. But the
next one is not scheduled at once: what the device is doing takes a while, and whoever comes
meanwhile would find the next step taken, too. `spare_seconds` says how long to wait for requests.

What a constrained sequence may draw depends on the token drawn before. A step that has one such is
scheduled and packed as early as any, and launched once the step before is committed: the device
waits while masks are made, and for nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher

from jaxserve.executor import Executor, Launched, Prepared
from jaxserve.policy import MARGIN, Refusal, schedule_at
from jaxserve.request import Request, TokenEvent
from jaxserve.scheduler import Scheduler

HOST_MEMORY = 0.95
"""Of the longest time the host took for a step, kept from one step to the next."""
POLL, POLL_SHARE = 0.002, 0.02
"""Seconds between two looks at whether a step is done, at most, and as a share of the last step:
the next one is launched already, but a small model's may take no longer than a look."""


@dataclass(slots=True)
class Counters:
    """Totals since the engine was made.

    Attributes:
        steps: that ran. step_tokens: that they computed, prompts and decodes.
        prompt_tokens: computed. output_tokens: drawn.
        asked_tokens: of the prompts that got a first token. found_tokens: of them, those that
            others had computed already.
        rows: of the last step.
        step_seconds: duration of the last step.
        gap_seconds: that the device waited for the host although there was work.
    """

    steps: int = 0
    step_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    asked_tokens: int = 0
    found_tokens: int = 0
    rows: int = 0
    step_seconds: float = 0.0
    gap_seconds: float = 0.0


class Engine:
    """Requests in, token events out. Not thread-safe: one caller drives it."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, look_ahead: bool = True
    ) -> None:
        """Args:
        scheduler: decides what runs.
        executor: runs it.
        look_ahead: launch a step before the previous one's tokens are known. The tokens
            are the same either way; without it the device idles while the host works.
        """
        self.scheduler = scheduler
        self.counters = Counters()
        self.executor = executor
        self._look_ahead = look_ahead
        self._in_flight: Launched | None = None
        self._collected = time.perf_counter()
        self._was_idle = True
        self._preparing = 0.0
        self._host_seconds = 0.0
        self._schedule_at = 0.0
        self._patience = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def add(
        self,
        request: Request,
        *,
        arrived: float | None = None,
        matcher: LLMatcher | None = None,
    ) -> Refusal | None:
        """Queue a request, unless it cannot be served in time now.

        Raises RequestError if it can never be served.

        Args:
            request: it.
            arrived: when it came, in seconds of `time.monotonic`; None is now.
            matcher: of `Grammars`, if the request has a constraint.
        """
        return self.scheduler.add(request, arrived=arrived, matcher=matcher)

    def abort(self, request_id: str) -> bool:
        """Drop a request. No further event of it comes. False if it is not in flight."""
        return self.scheduler.abort(request_id)

    @property
    def spare_seconds(self) -> float:
        """How long `step` may be put off without the device having to wait. Ask again after that:
        what runs may have ended sooner than expected, or there may be more time.

        0 if nothing runs, or if nobody can tell how long steps take.
        """
        if self._in_flight is None or self.executor.is_done(self._in_flight):
            return 0.0
        now = self.scheduler.clock()
        return max(0.0, min(self._schedule_at - now, self._patience))

    def step(self, meanwhile: Callable[[float], None] | None = None) -> list[TokenEvent]:
        """Launch the next step, if there is anything to run, and report the one before it.

        An exception from here is final: the device state may be gone.

        Args:
            meanwhile: called again and again until the device is done, with the seconds it may
                take: for what need not wait for that, such as `add` and `abort`.
        """
        events = self.scheduler.expire()
        prepared = self._prepare()
        if not self._look_ahead:
            return events + self._collect(self._launch(prepared), meanwhile)
        if prepared is not None and prepared.awaits_tokens:
            events += self._collect(self._in_flight, meanwhile)
            self._in_flight = self._launch(prepared)
        else:
            launched = self._launch(prepared)
            events += self._collect(self._in_flight, meanwhile)
            self._in_flight = launched
        now, device_free = self.scheduler.clock(), self.scheduler.policy.device_free
        self._schedule_at = schedule_at(device_free, now, self._host_seconds)
        self._patience = MARGIN * (device_free - now)
        return events

    def _prepare(self) -> Prepared | None:
        began = time.perf_counter()
        spans = self.scheduler.schedule()
        self.executor.move(self.scheduler.take_moves())
        if not spans:
            self._was_idle = True
            return None
        prepared = self.executor.prepare(spans)
        self._preparing = time.perf_counter() - began
        return prepared

    def _launch(self, prepared: Prepared | None) -> Launched | None:
        if prepared is None:
            return None
        began = time.perf_counter()
        launched = self.executor.launch(prepared)
        took = self._preparing + time.perf_counter() - began
        self._host_seconds = max(took, HOST_MEMORY * self._host_seconds)
        return launched

    def _collect(
        self, launched: Launched | None, meanwhile: Callable[[float], None] | None
    ) -> list[TokenEvent]:
        if launched is None:
            return []
        patience = min(POLL, POLL_SHARE * self.counters.step_seconds)
        while meanwhile is not None and not self.executor.is_done(launched):
            meanwhile(patience)
        drawn = self.executor.collect(launched)
        now = time.perf_counter()
        # With look-ahead a step is launched while the one before still runs.
        self.counters.step_seconds = now - max(launched.started, self._collected)
        if not self._was_idle:
            self.counters.gap_seconds += max(0.0, launched.started - self._collected)
        self._was_idle = False
        self._collected = now
        self.scheduler.policy.observe_step(
            launched.spans, self.counters.step_seconds, self.scheduler.clock()
        )
        events = self.scheduler.commit(launched.spans, drawn)
        self._count(launched, events)
        return events

    def _count(self, launched: Launched, events: list[TokenEvent]) -> None:
        counters = self.counters
        counters.steps += 1
        counters.rows = len(launched.spans)
        counters.output_tokens += sum(event.token_id is not None for event in events)
        for span in launched.spans:
            counters.step_tokens += span.num_tokens
            prompt = span.sequence.num_prompt
            counters.prompt_tokens += max(0, min(span.stop, prompt) - span.start)
            if span.draws and span.stop == prompt:
                counters.asked_tokens += prompt
                counters.found_tokens += span.sequence.num_cached
