"""How much a step may do: the arithmetic between a promised TPOT and the step-time model.

TPOT is the mean over a request's tokens, so a single step may take longer than the TPOT if others
took less. That is budgeted: steps aim at `CALM` of the TPOT, and what quick steps leave of it is
saved up to a limit, to be spent on prompts that would otherwise be late. The limit is what the rest
of the TPOT pays back over the tokens of a short answer: a request of `SHORT_ANSWER` tokens or more
keeps its TPOT wherever in the ups and downs it falls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.step_time import StepLoad, StepTimeModel

CALM = 0.92
"""Share of the TPOT that a step may take when nobody is at risk."""
STRETCH = 2.0
"""Times the TPOT that a step may take at most."""
SHORT_ANSWER = 60
"""Tokens. In the reference workload 96 answers in 100 are longer."""
PREFILL_SHARE = 0.5
"""Of a step, that decodes leave to prompts if they need it. Prompts that need more than that are
what is short: fewer running sequences would not serve them any sooner."""
LEAST_PREFILL = 16
"""Prompt tokens that every step has room for, whatever the model says: so that a model that is
wrong can find out."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """The decoding part of a step: its rows, and tokens they have in the cache together."""

    rows: int
    kv_tokens: int


class Pace:
    """Turns a TPOT into limits.

    Attributes:
        model: predicts steps.
        calm: seconds a step may take.
        saved: seconds that steps may take longer, all together; negative if they took too long.
    """

    def __init__(self, model: StepTimeModel, tpot: float) -> None:
        self.model = model
        self.calm = CALM * tpot
        self.saved = 0.0
        self._longest = STRETCH * tpot
        self._most = SHORT_ANSWER * (tpot - self.calm)

    @property
    def seconds(self) -> float:
        """What a step may take now. What was overspent is paid back little by little."""
        return self.calm + min(0.0, self.saved) / 8

    @property
    def stretched(self) -> float:
        """What a step may take for a prompt at risk."""
        return min(self._longest, self.seconds + max(0.0, self.saved))

    def count(self, seconds: float) -> None:
        """A step took this long."""
        self.saved = max(-self._most, min(self._most, self.saved + self.calm - seconds))

    def step_seconds(self, decodes: Decodes, prefill_tokens: float, start: float) -> float:
        """Such a step: these decodes, and tokens of a prompt after its first `start` ones."""
        return self.model.predict(
            StepLoad(
                decodes.rows + prefill_tokens,
                decodes.kv_tokens + (start + prefill_tokens if prefill_tokens else 0),
                prefill_tokens * (start + prefill_tokens / 2),
            )
        )

    def prefill_tokens(self, decodes: Decodes, start: int, seconds: float, most: int) -> int:
        """Prompt tokens that fit beside the decodes into a step of so many seconds."""
        fitting = largest(lambda n: self.step_seconds(decodes, n, start) <= seconds, most)
        return min(most, max(LEAST_PREFILL, fitting))

    def running_limit(self, context: float, prompt_per_output: float, most: int) -> int:
        """The most sequences that can run beside the least prefill that must go on: as many prompt
        tokens as come in, but no more than `PREFILL_SHARE` of a step has room for.

        Args:
            context: tokens a sequence holds, on average.
            prompt_per_output: prompt tokens that come in for every token that goes out.
            most: never more than this.
        """

        reserved = PREFILL_SHARE * self.calm / self.model.prompt_seconds(round(context / 2), 1)

        def fits(rows: int) -> bool:
            decodes = Decodes(rows, round(rows * context))
            prefill = min(rows * prompt_per_output, reserved)
            return self.step_seconds(decodes, prefill, context / 2) <= self.calm

        return max(1, largest(fits, most))


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which `holds`, which only ever turns false; else 0."""
    if holds(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
