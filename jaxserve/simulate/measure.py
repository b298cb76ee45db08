"""From outcomes to the numbers a promise is about."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.simulate.loop import Run
from jaxserve.workload import Promise

WARM_UP = 0.2
"""Share of the requests, the first ones, that are not counted."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds and requests a second.

    Attributes:
        offered: requests that came.
        goodput: those that got their first token and the others in time.
        shed: share of the requests that was refused.
        cut: share of the others whose answer was cut short.
        ttft: the promised percentile over those let in. tpot: likewise.
        rows: sequences running, on average over time. rows_max: at most.
        busy: share of the time the device worked.
        response: from arrival to the last token, on average over those let in.
        preemptions: that happened.
    """

    offered: float
    goodput: float
    shed: float
    cut: float
    ttft: float
    tpot: float
    rows: float
    rows_max: int
    busy: float
    response: float
    preemptions: int

    def keeps(self, promise: Promise) -> bool:
        """Whether those let in got what was promised."""
        return self.ttft < promise.ttft and self.tpot < promise.tpot

    def users(self, think_seconds: float) -> float:
        """People who, thinking so long between an answer and the next request, make this load."""
        return self.offered * (1 - self.shed) * (self.response + think_seconds)


def measure(result: Run, promise: Promise) -> Measured:
    """Sum a simulation up."""
    outcomes = result.outcomes[int(len(result.outcomes) * WARM_UP) :]
    served = [outcome for outcome in outcomes if outcome.refusal is None]
    seconds = outcomes[-1].arrival.at - outcomes[0].arrival.at
    good = sum(o.ttft < promise.ttft and o.tpot < promise.tpot for o in served)
    return Measured(
        offered=len(outcomes) / seconds,
        goodput=good / seconds,
        shed=1 - len(served) / len(outcomes),
        cut=sum(outcome.is_cut for outcome in served) / max(1, len(served)),
        ttft=percentile((outcome.ttft for outcome in served), promise.percentile),
        tpot=percentile((o.tpot for o in served if o.num_tokens > 1), promise.percentile),
        rows=result.row_seconds / result.seconds,
        rows_max=result.rows_max,
        busy=result.busy_seconds / result.seconds,
        response=sum(o.last - o.arrival.at for o in served) / max(1, len(served)),
        preemptions=result.preemptions,
    )


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed; 0 of none."""
    ordered = sorted(values)
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[max(0, rank - 1)] if ordered else 0.0
