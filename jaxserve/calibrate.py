"""What this device really does: a few steps and page moves, timed before anyone is served."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.executor import Executor
from jaxserve.request import Request, SamplingParams
from jaxserve.sequence import Sequence, Span
from jaxserve.swap import Move, SwapCost

MOVED_PAGES = 16


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds, each of a run after a warm-up.

    Attributes:
        prefill_step: of a step of `prefill_tokens` tokens of one prompt.
        prefill_tokens: the token budget, or what the pool holds if that is less.
        decode_step: of a step with a single decode.
        page_move: to bring one page to the host and back.
    """

    prefill_step: float
    prefill_tokens: int
    decode_step: float
    page_move: float

    @property
    def swap_cost(self) -> SwapCost:
        """What a preempted sequence's way back costs."""
        per_token = self.prefill_step / self.prefill_tokens
        return SwapCost(self.page_move, per_token)


def calibrate(
    executor: Executor, *, num_pages: int, page_size: int, token_budget: int
) -> Calibration:
    """Time an idle executor. Writes to its pages: nobody may have computed anything yet."""
    num_tokens = min(token_budget, (num_pages - 1) * page_size)
    sequence = Sequence(
        Request("calibration", (0,) * num_tokens, SamplingParams(max_tokens=1)),
        tokens=array("i", [0] * num_tokens),
        pages=array("i", range(1, 1 + -(-num_tokens // page_size))),
        slot=0,
    )
    prefill = Span(sequence, 0, num_tokens, feed=False, draws=True)
    decode = Span(sequence, num_tokens - 1, num_tokens, feed=False, draws=True)
    moved = tuple(sequence.pages[:MOVED_PAGES])

    def step(span: Span) -> None:
        executor.collect(executor.launch((span,)))

    def move() -> None:
        executor.move((Move("out", sequence, moved), Move("in", sequence, moved)))
        step(decode)  # a step waits for the moves before it
        executor.move((Move("drop", sequence),))

    decode_step = _second_time(lambda: step(decode))
    return Calibration(
        prefill_step=_second_time(lambda: step(prefill)),
        prefill_tokens=num_tokens,
        decode_step=decode_step,
        page_move=max(0.0, _second_time(move) - decode_step) / len(moved),
    )


def _second_time(run: Callable[[], None]) -> float:
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
