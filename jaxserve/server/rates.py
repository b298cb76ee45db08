"""How much each key may ask for in a minute: token buckets, and the headers that tell of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from jaxserve.errors import Overloaded

MINUTE = 60.0


class RateLimited(Overloaded):
    """A request beyond what its key may ask for in a minute."""


class Bucket:
    """Holds a minute's worth, and fills up within a minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """What is in it; below 0 after more was taken than there was."""
        filled = (now - self._at) * self.per_minute / MINUTE
        return min(float(self.per_minute), self._level + filled)

    def wait(self, amount: int, now: float) -> float:
        """Seconds until so much may be taken. More than a minute's worth waits for a full one."""
        missing = min(amount, self.per_minute) - self.level(now)
        return max(0.0, missing * MINUTE / self.per_minute)

    def take(self, amount: int, now: float) -> None:
        """Take it, even if it is not there."""
        self._level, self._at = self.level(now) - amount, now


class Rates:
    """The buckets of every key.

    A request's prompt is taken from the tokens before it runs, its output once it has ended: who
    has generated more than there was waits until that is made good.
    """

    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """None: as many as there may be."""
        limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._limits = {what: limit for what, limit in limits.items() if limit is not None}
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def admit(self, caller: str, what: str, amount: int) -> None:
        """Take so many "requests" or "tokens". RateLimited if they are not there."""
        bucket, now = self._bucket(caller, what), self._clock()
        if bucket is None:
            return
        wait = bucket.wait(amount, now)
        if wait > 0:
            raise RateLimited(
                f"this API key may ask for {bucket.per_minute:,} {what} a minute: try again in "
                f"{wait:.3g} s",
                retry_after=wait,
            )
        bucket.take(amount, now)

    def spend(self, caller: str, what: str, amount: int) -> None:
        """Take what has been used already."""
        bucket = self._bucket(caller, what)
        if bucket is not None:
            bucket.take(amount, self._clock())

    def headers(self, caller: str) -> dict[str, str]:
        """What a key has left, as OpenAI says it; empty without limits."""
        told, now = {}, self._clock()
        for what, limit in self._limits.items():
            bucket = self._bucket(caller, what)
            assert bucket is not None  # there is a limit
            told[f"x-ratelimit-limit-{what}"] = str(limit)
            told[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(bucket.level(now))))
            told[f"x-ratelimit-reset-{what}"] = f"{bucket.wait(limit, now):.3f}s"
        return told

    def _bucket(self, caller: str, what: str) -> Bucket | None:
        limit = self._limits.get(what)
        if limit is None:
            return None
        if (caller, what) not in self._buckets:
            self._buckets[caller, what] = Bucket(limit, self._clock())
        return self._buckets[caller, what]
