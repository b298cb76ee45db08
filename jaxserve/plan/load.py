"""Steps of a roofline under a workload, and what fits a promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.plan.result import BatchPoint, Limits, PrefillPoint
from jaxserve.roofline import Roofline, StepWork
from jaxserve.workload import Promise, Workload


@dataclass(frozen=True, slots=True)
class Load:
    """Average steps: every row holds the average context.

    Attributes:
        roofline: predicts a step.
        workload: what is asked.
        promise: what to keep.
        min_prefill: prompt tokens every step must have room for; None takes as many as come in
            while the running rows draw their tokens.
    """

    roofline: Roofline
    workload: Workload
    promise: Promise
    min_prefill: int | None = None

    def seconds(self, rows: int, prefill_tokens: int = 0) -> float:
        """Duration of a step that decodes `rows` sequences and prefills beside them."""
        work = self.decode(rows)
        if prefill_tokens:
            work += self._prefill(prefill_tokens)
        return self.roofline.work_seconds(work)

    def decode(self, rows: int) -> StepWork:
        return self.roofline.decode_work(rows, self.workload.running_context)

    def fits(self, rows: int, prefill_tokens: int) -> bool:
        return self.seconds(rows, prefill_tokens) <= self.promise.tpot

    def room(self, rows: int) -> int:
        """Prefill tokens that fit a step beside this many decodes."""
        return largest(lambda tokens: self.fits(rows, tokens))

    def steady_share(self, rows: int) -> int:
        """Prompt tokens that come in while `rows` sequences draw a token each."""
        return math.ceil(rows * self.workload.prompt_per_output)

    def share(self, rows: int) -> int:
        """The minimum of prefill tokens in a step of this many decodes."""
        return self.steady_share(rows) if self.min_prefill is None else self.min_prefill

    @property
    def ttft_steps(self) -> int:
        """Steps a prompt can spread over: TTFT's worth, but for the one that is running already."""
        return max(1, int(self.promise.ttft / self.promise.tpot) - 1)

    @property
    def ttft_share(self) -> int:
        """Prefill tokens a step needs for a p95 prompt to be ready within TTFT."""
        return math.ceil(self.workload.prompt_p95 / self.ttft_steps)

    def limits(self, memory: int) -> Limits:
        """Where each of the limits lies, if memory holds this many sequences."""
        admission = largest(lambda rows: self.fits(rows, self.share(rows)))
        return Limits(
            memory=memory,
            decode_only=largest(lambda rows: self.fits(rows, 0)),
            admission=min(memory, admission),
            ttft=min(memory, largest(lambda rows: self.fits(rows, self.ttft_share))),
        )

    def requests_per_second(self, rows: int) -> float:
        """Requests that come and go while `rows` sequences run, within the promise."""
        prefill = min(self.room(rows), self.steady_share(rows))
        a_step = min(rows / self.workload.output_mean, prefill / self.workload.prompt_mean)
        return a_step / self.seconds(rows, prefill)

    def batch_point(self, rows: int) -> BatchPoint:
        without_kv = self.roofline.step_seconds(rows)
        tpot = self.seconds(rows, self.share(rows))
        return BatchPoint(
            rows=rows,
            without_kv_seconds=without_kv,
            decode_seconds=without_kv + self.roofline.attention_seconds(self.decode(rows)),
            tpot_seconds=tpot,
            prefill_left=self.room(rows),
            tokens_per_second=rows / tpot,
        )

    def prefill_point(self, tokens: int, rows: int) -> PrefillPoint:
        """A prompt by itself, and beside `rows` decodes."""
        chunk = self.room(rows)
        ttft = None
        if chunk:
            steps = math.ceil(tokens / chunk) + 1
            ttft = steps * self.seconds(rows, min(chunk, tokens))
        return PrefillPoint(tokens, self.roofline.prefill_seconds(tokens), ttft)

    def _prefill(self, tokens: int) -> StepWork:
        """From the middle of a p95 prompt, or of as many of those as it takes."""
        longest = self.workload.prompt_p95
        part = min(tokens, longest)
        start = (longest - part) / 2
        return self.roofline.shape.span(start, start + part).scaled(tokens / part)


def largest(holds: Callable[[int], bool], bound: int = 1 << 24) -> int:
    """The largest number up to `bound` for which `holds`, which only ever turns false; else 0."""
    low, high = 0, 1
    while high < bound and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
