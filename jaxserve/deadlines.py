"""Whose time is up."""

from __future__ import annotations

import heapq
import itertools

from jaxserve.sequence import Sequence


class Deadlines:
    """The deadlines of the sequences in flight. Those without one cost nothing."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._order = itertools.count()

    def add(self, sequence: Sequence) -> None:
        """Watch a new sequence."""
        if sequence.request.deadline is not None:
            due = sequence.arrived + sequence.request.deadline
            heapq.heappush(self._heap, (due, next(self._order), sequence))

    def passed(self, now: float) -> list[Sequence]:
        """Unfinished sequences whose deadline has passed, each reported once."""
        found = []
        while self._heap and self._heap[0][0] < now:
            sequence = heapq.heappop(self._heap)[2]
            if not sequence.finished:
                found.append(sequence)
        return found
