"""Preempted sequences kept in host memory: what fits, what pays, and what has to be moved.

Knows page numbers, not their content: the executor moves that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.pages import PagePool
from jaxserve.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Move:
    """Pages to copy between device and host before a step's other work.

    Attributes:
        way: "out" saves pages under the sequence's name, "in" restores some of them, "drop"
            forgets them.
        sequence: whose they are; identity is the name.
        pages: device pages, in the order of the sequence's tokens. Empty for "drop".
        first: for "in": index among the saved pages of the first one to restore.
    """

    way: Literal["out", "in", "drop"]
    sequence: Sequence
    pages: tuple[int, ...] = ()
    first: int = 0


@dataclass(frozen=True, slots=True)
class SwapCost:
    """What coming back costs, measured at start-up.

    Attributes:
        seconds_per_page: out and in together.
        seconds_per_token: of prefill.
        seconds_fixed: of any swap, however small.
    """

    seconds_per_page: float
    seconds_per_token: float
    seconds_fixed: float = 0.0

    def swap_pays(self, num_pages: int, num_tokens: int) -> bool:
        """Whether moving the pages takes less time than computing the tokens again."""
        swap = self.seconds_fixed + num_pages * self.seconds_per_page
        return swap < num_tokens * self.seconds_per_token


class SwapSpace:
    """Room on the host for `num_pages` pages of preempted sequences.

    Attributes:
        num_swaps: sequences swapped out so far.
    """

    def __init__(self, pool: PagePool, num_pages: int, cost: SwapCost) -> None:
        self._pool = pool
        self._free = num_pages
        self._cost = cost
        self._moves: list[Move] = []
        self.num_swaps = 0

    def save(self, sequence: Sequence) -> bool:
        """Swap out a sequence that is about to lose its pages, if there is room and it pays.

        Its pages may be handed out again at once: moves come before a step's writes.
        """
        num_pages = self._pool.pages_for(sequence.num_computed)
        if num_pages > self._free or not self._cost.swap_pays(num_pages, sequence.num_computed):
            return False
        self._free -= num_pages
        self.num_swaps += 1
        sequence.num_swapped = sequence.num_computed
        self._moves.append(Move("out", sequence, tuple(sequence.pages[:num_pages])))
        return True

    def restore(self, sequence: Sequence) -> None:
        """Bring back what the sequence had computed, except pages it holds already.

        It must have been given pages for all of it.
        """
        num_pages = self._pool.pages_for(sequence.num_swapped)
        held = self._pool.pages_for(sequence.num_computed)
        if held < num_pages:
            self._moves.append(Move("in", sequence, tuple(sequence.pages[held:num_pages]), held))
            sequence.num_computed = sequence.num_swapped
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forget what is saved of the sequence."""
        if sequence.num_swapped:
            self._free += self._pool.pages_for(sequence.num_swapped)
            sequence.num_swapped = 0
            self._moves.append(Move("drop", sequence))

    def take_moves(self) -> tuple[Move, ...]:
        """The moves to make before the next step, in order."""
        moves, self._moves = tuple(self._moves), []
        return moves
