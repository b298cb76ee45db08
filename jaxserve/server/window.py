"""Exact percentiles over the last minute: what a promise is about, without a histogram's edges."""

from __future__ import annotations

import math
from collections import deque

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
        while self._values and self._values[0][0] < now - SECONDS:
            self._values.popleft()
        if not self._values:
            return math.nan
        ordered = sorted(value for _, value in self._values)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
