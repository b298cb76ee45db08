"""When to come again: a queue outside the server.

Who is refused is told a time, and each gets a time of its own: the next one when the work promised
to those before it will be done. Whoever comes again at its time is known by its prompt and finds
the work it was promised kept free. How much is kept free depends on how many do come again.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from jaxserve.request import Request

FILL = 0.8
"""Share of the server's speed that is promised to returning clients: others come, too."""
GRACE = 5.0
"""Seconds after its time until a place is given away."""
LONGEST = 120.0
"""Nobody is told to wait longer than this, in seconds."""
MEMORY = 50
"""Places after which what one did counts for about a third."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a refused client was told.

    Attributes:
        due: when to come again, in seconds of the scheduler's clock.
        work: seconds of the server's time kept for it.
        tenant: who.
    """

    due: float
    work: float
    tenant: str


class Places:
    """The queue of those who were sent away.

    Attributes:
        returning: share of them that come again, as it has been lately.
    """

    def __init__(self) -> None:
        self.returning = 1.0
        self._places: dict[int, Place] = {}
        self._order: deque[tuple[float, int]] = deque()
        self._horizon = 0.0

    def reserve(self, request: Request, now: float, *, earliest: float, work: float) -> float:
        """Give a refused request a place.

        Args:
            request: it.
            now: the time.
            earliest: seconds from now before which it would be refused again.
            work: seconds of the server's time it takes.

        Returns:
            Seconds to wait: a whole number, as HTTP has it.
        """
        self._horizon = max(self._horizon, now + earliest) + work * self.returning / FILL
        wait = float(math.ceil(min(LONGEST, max(1.0, self._horizon - now))))
        self._horizon = min(self._horizon, now + LONGEST)
        key = _key(request)
        self._places[key] = Place(now + wait, work, request.tenant)
        self._order.append((now + wait, key))
        return wait

    def claim(self, request: Request, now: float) -> bool:
        """Whether this request was told to come now. Its place is then taken."""
        place = self._places.get(_key(request))
        if place is None or now < place.due - 0.5:
            return False
        del self._places[_key(request)]
        self._learn(1.0)
        return True

    def due(self, now: float, window: float) -> list[Place]:
        """Places whose time has come or comes within `window` seconds."""
        self._expire(now)
        found = []
        for due, key in self._order:
            if due > now + window + 1.0:  # times are rounded up, so nearly in order
                break
            place = self._places.get(key)
            if place is not None and place.due <= now + window:
                found.append(place)
        return found

    def _expire(self, now: float) -> None:
        while self._order and self._order[0][0] < now - GRACE:
            due, key = self._order.popleft()
            place = self._places.get(key)
            if place is not None and place.due == due:
                del self._places[key]
                self._learn(0.0)

    def _learn(self, returned: float) -> None:
        self.returning += (returned - self.returning) / MEMORY


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


def _key(request: Request) -> int:
    return hash((request.tenant, request.prompt_ids))
