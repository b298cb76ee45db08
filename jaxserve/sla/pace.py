"""How much a step may do: the arithmetic between a promised TPOT and the step-time model.

Steps aim at `CALM` of the TPOT. But TPOT is the mean over a request's tokens, so one token may come
later if others came sooner. That is used for prompts that would otherwise be late: a step may leave
the decodes out if every running request can still keep its TPOT after that (`to_spare`), never two
in a row. Which costs a stream no more than a step twice as long would, but leaves the step short,
and newcomers need not wait for the end of a long one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.sla.step_time import StepLoad, StepTimeModel

CALM = 0.92
"""Share of the TPOT that a step may take when nobody is at risk."""
SHORT_ANSWER = 60
"""Tokens. In the reference workload 96 answers in 100 are longer."""
USUAL_STEPS = 100
"""Steps over which the usual time per token is measured."""
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
        usual: seconds per token, of late.
    """

    def __init__(self, model: StepTimeModel, tpot: float) -> None:
        self.model = model
        self.calm = CALM * tpot
        self.usual = self.calm
        self._tpot = tpot
        self._saved = 0.0
        self._most = SHORT_ANSWER * (tpot - self.calm)

    @property
    def seconds(self) -> float:
        """What a step may take now: the less, the more expectations have been off. What was
        overspent is paid back little by little."""
        return self.calm / (1 + self.model.error) + min(0.0, self._saved) / 8

    def count(self, seconds: float) -> None:
        """A token of every running sequence took this long to come."""
        self._saved = max(-self._most, min(self._most, self._saved + self.calm - seconds))
        self.usual += (seconds - self.usual) / USUAL_STEPS

    def to_spare(self, num_tokens: int, seconds: float) -> float:
        """How much later the next token may come, for an answer to keep its TPOT even if it ends
        soon: with its next token, or with `SHORT_ANSWER` tokens if it has fewer.

        Args:
            num_tokens: it has.
            seconds: since the first of them.
        """
        to_come = max(1, SHORT_ANSWER - num_tokens)
        return self._tpot * (num_tokens + to_come - 1) - seconds - to_come * self.usual

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
