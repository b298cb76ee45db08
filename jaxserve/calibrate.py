"""What this device really does: a few steps and page moves, timed before anyone is served."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxserve.executor import Executor
from jaxserve.request import Request, SamplingParams
from jaxserve.sequence import Sequence as Running
from jaxserve.sequence import Span
from jaxserve.swap import Move, SwapCost

MOVED_PAGES = 16


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds, each of a run after a warm-up.

    Attributes:
        step_seconds: of a step of so many tokens of one prompt, by their number: 1 (a decode),
            every second of the compiled sizes, and the largest that the pool holds.
        page_move: to bring one page to the host and back.
    """

    step_seconds: Mapping[int, float]
    page_move: float

    @property
    def longest_step(self) -> float:
        """The step of the most tokens."""
        return self.step_seconds[max(self.step_seconds)]

    @property
    def swap_cost(self) -> SwapCost:
        """What a preempted sequence's way back costs."""
        return SwapCost(self.page_move, self.longest_step / max(self.step_seconds))


def calibrate(
    executor: Executor, *, max_context: int, page_size: int, sizes: Sequence[int]
) -> Calibration:
    """Time an idle executor. Writes to its pages: nobody may have computed anything yet.

    Args:
        executor: it.
        max_context: most tokens of a sequence, at most what the pool holds. page_size: B.
        sizes: tokens of the steps it was compiled for, smallest first.
    """
    num_tokens = min(sizes[-1], max_context)
    sequence = Running(
        Request("calibration", (0,) * num_tokens, SamplingParams(max_tokens=1)),
        tokens=array("i", [0] * num_tokens),
        pages=array("i", range(1, 1 + -(-num_tokens // page_size))),
        slot=0,
    )
    moved = tuple(sequence.pages[:MOVED_PAGES])

    def step(size: int) -> None:
        """The last tokens of the prompt."""
        span = Span(sequence, num_tokens - size, num_tokens, feed=False, draws=True)
        executor.collect(executor.launch(executor.prepare((span,))))

    def move() -> None:
        executor.move((Move("out", sequence, moved), Move("in", sequence, moved)))
        step(1)  # a step waits for the moves before it
        executor.move((Move("drop", sequence),))

    timed = {1, num_tokens, *(size for size in sizes[::-2] if size < num_tokens)}
    step_seconds = {size: _second_time(partial(step, size)) for size in sorted(timed)}
    page_move = max(0.0, _second_time(move) - step_seconds[1]) / len(moved)
    return Calibration(step_seconds, page_move)


def _second_time(run: Callable[[], None]) -> float:
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
