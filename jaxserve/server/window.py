"""Exact percentiles over the last minute: what a promise is about, without a histogram's edges."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

SECONDS = 60.0
MOST = 10_000
"""Values kept; beyond that the window is shorter than a minute."""


class Window:
    """The values of the last minute."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST)

    def add(self, value: float, now: float) -> None:
        """Note a value. `now` in seconds, never going back."""
        self._values.append((now, value))

    def percentile(self, percent: float, now: float) -> float:
        """The smallest value that so many percent do not exceed; NaN if there is none."""
        return self.percentiles((percent,), now)[0]

    def percentiles(self, percents: Sequence[float], now: float) -> tuple[float, ...]:
        """Several of them, for one sorting."""
        while self._values and self._values[0][0] < now - SECONDS:
            self._values.popleft()
        ordered = sorted(value for _, value in self._values) or [math.nan]
        last = len(ordered)
        return tuple(ordered[max(0, math.ceil(p / 100 * last) - 1)] for p in percents)
