"""The loop body: where the host side and the device side meet.

    schedule -> launch (pack, dispatch) -> collect the step before -> commit -> events

The step just launched runs while the one before it is committed and the next one is scheduled:
the device never waits for the host, as long as a step takes longer than the host's work.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from jaxserve.executor import Executor, Launched
from jaxserve.request import Request, TokenEvent
from jaxserve.scheduler import Scheduler


@dataclass(slots=True)
class Counters:
    """Totals since the engine was made. step_seconds is the duration of the last step."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    step_seconds: float = 0.0


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

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never be served."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request. No further event of it comes. False if it is not in flight."""
        return self.scheduler.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """Launch the next step, if there is anything to run, and report the one before it.

        An exception from here is final: the device state may be gone.
        """
        if not self._look_ahead:
            return self._collect(self._launch())
        launched = self._launch()
        events = self._collect(self._in_flight)
        self._in_flight = launched
        return events

    def _launch(self) -> Launched | None:
        spans = self.scheduler.schedule()
        self.executor.move(self.scheduler.take_moves())
        return self.executor.launch(spans) if spans else None

    def _collect(self, launched: Launched | None) -> list[TokenEvent]:
        if launched is None:
            return []
        drawn = self.executor.collect(launched)
        now = time.perf_counter()
        # With look-ahead a step is launched while the one before still runs.
        self.counters.step_seconds = now - max(launched.started, self._collected)
        self._collected = now
        events = self.scheduler.commit(launched.spans, drawn)
        self._count(launched, events)
        return events

    def _count(self, launched: Launched, events: list[TokenEvent]) -> None:
        counters = self.counters
        counters.steps += 1
        counters.output_tokens += sum(event.token_id is not None for event in events)
        for span in launched.spans:
            prompt = len(span.sequence.request.prompt_ids)
            counters.prompt_tokens += max(0, min(span.stop, prompt) - span.start)
