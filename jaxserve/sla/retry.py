"""When to come again: a queue outside the server.

Who is refused is told a time, and no more are told to come in any second than the server has time
for. Whoever comes again at its time is known by its prompt and finds the work it was promised kept
free. How much is kept free depends on how many do come again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

from jaxserve.request import Request

FILL = 0.4
"""Of each second, for returning clients: others come, too."""
GRACE = 5.0
"""Seconds after its time until a place is given away."""
LONGEST = 120
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
        self._order: list[tuple[float, int]] = []
        self._calendar: dict[int, float] = {}

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
        first = max(1, math.ceil(earliest))
        # More than a second has room for takes several.
        share = work * self.returning
        num_seconds = max(1, math.ceil(share / FILL))
        share /= num_seconds
        waits = range(first, LONGEST)
        wait = next((w for w in waits if self._has_time(now + w, num_seconds, share)), LONGEST)
        for second in range(int(now + wait), int(now + wait) + num_seconds):
            self._calendar[second] = self._calendar.get(second, 0.0) + share
        key = _key(request)
        self._places[key] = Place(now + wait, work, request.tenant)
        insort(self._order, (now + wait, key))
        return float(wait)

    def _has_time(self, at: float, num_seconds: int, share: float) -> bool:
        """Whether so many seconds from then on have room for such a share of work each."""
        seconds = range(int(at), int(at) + num_seconds)
        return all(self._calendar.get(second, 0.0) + share <= FILL for second in seconds)

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
            if due > now + window:
                break
            place = self._places.get(key)
            if place is not None and place.due == due:
                found.append(place)
        return found

    def _expire(self, now: float) -> None:
        num_old = bisect_left(self._order, (now - GRACE, 0))
        for due, key in self._order[:num_old]:
            place = self._places.get(key)
            if place is not None and place.due == due:
                del self._places[key]
                self._learn(0.0)
        del self._order[:num_old]
        if len(self._calendar) > 2 * LONGEST:
            self._calendar = {second: x for second, x in self._calendar.items() if second >= now}

    def _learn(self, returned: float) -> None:
        self.returning += (returned - self.returning) / MEMORY


def _key(request: Request) -> int:
    return hash((request.tenant, request.prompt_ids))
