"""The engine's loop over virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.policy import Refusal, schedule_at
from jaxserve.request import TokenEvent
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Drawn, Span
from jaxserve.simulate.arrivals import Arrival
from jaxserve.simulate.device import SimulatedDevice

ANY_TOKEN = Drawn(token_id=0)
HOST_SECONDS = 0.001
"""Taken for scheduling and launching a step."""


class VirtualClock:
    """A clock that is moved by hand. Seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times in seconds.

    Attributes:
        arrival: the request.
        first, last: when its first and newest token came; None before.
        num_tokens: that came.
        refusal: if it was not let in.
    """

    arrival: Arrival
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0
    refusal: Refusal | None = None

    @property
    def ttft(self) -> float:
        """Time to first token; infinite if none came."""
        return float("inf") if self.first is None else self.first - self.arrival.at

    @property
    def tpot(self) -> float:
        """Mean time per token after the first."""
        if self.first is None or self.num_tokens < 2:
            return 0.0
        return (self.last - self.first) / (self.num_tokens - 1)

    @property
    def is_cut(self) -> bool:
        """Whether it got fewer tokens than it asked for."""
        return self.num_tokens < self.arrival.request.sampling.max_tokens


@dataclass(slots=True)
class Run:
    """A finished simulation.

    Attributes:
        outcomes: of the requests, in order of arrival.
        seconds: it took, virtually.
        steps: that ran.
        busy_seconds: of the device.
        row_seconds: sequences running, summed over time. rows_max: at most.
        preemptions: that happened.
    """

    outcomes: list[Outcome]
    seconds: float = 0.0
    steps: int = 0
    busy_seconds: float = 0.0
    row_seconds: float = 0.0
    rows_max: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    spans: tuple[Span, ...]
    end: float
    seconds: float


def run(
    arrivals: Iterable[Arrival],
    scheduler: Scheduler,
    device: SimulatedDevice,
    clock: VirtualClock,
) -> Run:
    """Serve every request to its end.

    As in the engine a step is scheduled while the one before it runs: shortly before its end if the
    policy can tell when that is, else when it begins.

    Args:
        arrivals: in order of time.
        scheduler: empty, on this clock.
        device: says how long steps take.
        clock: at 0.
    """
    result = Run([Outcome(arrival) for arrival in arrivals])
    outcomes = {outcome.arrival.request.request_id: outcome for outcome in result.outcomes}
    queue = deque(result.outcomes)
    in_flight: _Step | None = None
    device_free = 0.0
    while queue or scheduler.has_work or in_flight is not None:
        if in_flight is not None:
            free = scheduler.policy.device_free
            clock.now = max(clock.now, schedule_at(free, clock.now, HOST_SECONDS))
        elif not scheduler.has_work:
            clock.now = max(clock.now, queue[0].arrival.at)
        while queue and queue[0].arrival.at <= clock.now:
            outcome = queue.popleft()
            outcome.refusal = scheduler.add(outcome.arrival.request, arrived=outcome.arrival.at)
        _note(outcomes, scheduler.expire(), clock.now)
        spans = scheduler.schedule()
        launched = None
        if spans:
            seconds = device.seconds(spans)
            device_free = max(clock.now, device_free) + seconds
            launched = _Step(spans, device_free, seconds)
            result.steps += 1
            result.busy_seconds += seconds
            result.row_seconds += seconds * len(scheduler.running)
            result.rows_max = max(result.rows_max, len(scheduler.running))
        landed, in_flight = in_flight, launched
        if landed is not None:
            clock.now = max(clock.now, landed.end)
            scheduler.policy.observe_step(landed.spans, landed.seconds, clock.now)
            events = scheduler.commit(landed.spans, [ANY_TOKEN] * len(landed.spans))
            _note(outcomes, events, clock.now)
    result.seconds = clock.now
    result.preemptions = scheduler.num_preemptions
    return result


def _note(outcomes: dict[str, Outcome], events: Iterable[TokenEvent], now: float) -> None:
    for event in events:
        if event.token_id is None:
            continue
        outcome = outcomes[event.request_id]
        if outcome.first is None:
            outcome.first = now
        outcome.last = now
        outcome.num_tokens += 1
