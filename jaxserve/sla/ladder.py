"""How much of the allowance for misses is spent, and what is done about it.

A promise for 95 percent of the requests is an allowance: one in twenty may miss. The allowance
grows with every request and shrinks with every miss; how much of it is left is the pressure, and
the pressure decides on which rung of the ladder the server stands. Each rung is left at a lower
pressure than it was entered at, so that the server does not flutter.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

DEPTH = 16.0
"""Misses left at which there is no pressure."""
FIRST = 1.0
"""Misses that are allowed before any request has kept its promise, unless told otherwise."""
MOST = 16.0
"""Misses that can be saved up: a calm hour must not pay for a minute of chaos."""
PRUDENCE = 0.95
"""Share of the allowance that is ever spent: the rest covers the chance of the moment."""
MORE_PRUDENCE = 0.9
"""The same while requests are refused: in a crowd there is more of that."""

RUNGS = ("calm", "shorter answers", "shedding")
ENTER = (0.97, 1.0)
LEAVE = (0.875, 0.9)
"""Pressure at which each rung is entered and left. A server that has just started, with `FIRST` of
`DEPTH` left, is calm."""


class MissAllowance:
    """Fills by the allowed share with every request, empties by one with every miss.

    Attributes:
        left: misses that are still allowed. Negative when the promise is being broken.
    """

    def __init__(self, share: float, first: float = FIRST) -> None:
        """Args:
        share: of the requests, that may miss.
        first: misses allowed before any request has kept its promise.
        """
        self._share = share
        self.left = first

    def count(self, missed: bool, *, refusing: bool) -> None:
        """A request has kept its promise, or missed it, while others were refused or not."""
        gain = self._share * (MORE_PRUDENCE if refusing else PRUDENCE)
        self.left = max(-MOST, min(MOST, self.left + gain - missed))


class Ladder:
    """Degradation with hysteresis.

    Attributes:
        rung: 0 (nothing is done) to 2, see `RUNGS`.
    """

    def __init__(self, enter: Seq[float] = ENTER, leave: Seq[float] = LEAVE) -> None:
        self._enter = enter
        self._leave = leave
        self.rung = 0

    def move(self, pressure: float) -> None:
        """Climb or descend to where this pressure belongs. 0 is none, 1 an allowance spent."""
        while self.rung < len(self._enter) and pressure >= self._enter[self.rung]:
            self.rung += 1
        while self.rung > 0 and pressure < self._leave[self.rung - 1]:
            self.rung -= 1
