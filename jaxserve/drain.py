"""How fast requests finish: what a wait is computed from. Plain Python."""

from __future__ import annotations

from collections import deque


class Drain:
    """How fast requests finish."""

    def __init__(self) -> None:
        self._finishes: deque[float] = deque(maxlen=64)

    def note(self, now: float) -> None:
        """One has."""
        self._finishes.append(now)

    def rate(self, now: float) -> float:
        """Requests a second, of late. 1 as long as too few have finished to tell."""
        if len(self._finishes) < 8:
            return 1.0
        return len(self._finishes) / max(0.1, now - self._finishes[0])
