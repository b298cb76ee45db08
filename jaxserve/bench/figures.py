"""What became of requests, and the figures that are made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

PERCENTILES = (50, 90, 95, 99)
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """One request and what came back, in seconds of one clock.

    Attributes:
        sent: when it was sent. ended: when its answer was whole, or it had failed.
        pieces: when each piece of the answer came.
        prompt_tokens, completion_tokens: as the server counts them.
        error: why there is no whole answer, or None.
    """

    sent: float
    ended: float
    pieces: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """To the first piece."""
        return self.pieces[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean per token after the first; 0 for a single one."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.completion_tokens - 1)

    @property
    def e2e(self) -> float:
        """To the last piece."""
        return self.pieces[-1] - self.sent


LATENCIES: Mapping[str, Callable[[Answer], float]] = {
    "ttft": lambda answer: answer.ttft,
    "tpot": lambda answer: answer.tpot,
    "e2e": lambda answer: answer.e2e,
}
"""What a goodput can ask for."""


def summarise(answers: Sequence[Answer], seconds: float, goodput: Mapping[str, float]) -> Figures:
    """The figures of a run: rates a second, latencies in milliseconds.

    Args:
        answers: of all requests.
        seconds: from the first request to the end of the last answer.
        goodput: by name in LATENCIES, the most milliseconds of a request that counts as good.
    """
    whole = [answer for answer in answers if answer.error is None and answer.pieces]
    output = sum(answer.completion_tokens for answer in whole)
    prompts = sum(answer.prompt_tokens for answer in whole)
    figures = {
        "requests": len(answers),
        "failed": len(answers) - len(whole),
        "seconds": rounded(seconds),
        "requests_per_s": rounded(len(whole) / seconds),
        "output_tokens_per_s": rounded(output / seconds),
        "total_tokens_per_s": rounded((prompts + output) / seconds),
        "prompt_tokens_mean": rounded(prompts / max(1, len(whole))),
        "output_tokens_mean": rounded(output / max(1, len(whole))),
    }
    if goodput:
        good = sum(is_good(answer, goodput) for answer in whole)
        figures["goodput_per_s"] = rounded(good / seconds)
        figures["good_share"] = rounded(good / len(answers))
    if whole:
        gaps = [after - before for each in whole for before, after in pairwise(each.pieces)]
        found = {name: [read(each) for each in whole] for name, read in LATENCIES.items()}
        for name, values in (found | {"itl": gaps or [0.0]}).items():
            figures |= distribution(name, [value * 1e3 for value in values])
    return figures


def is_good(answer: Answer, goodput: Mapping[str, float]) -> bool:
    """Whether each latency is within its limit, in milliseconds."""
    return all(LATENCIES[name](answer) * 1e3 <= limit for name, limit in goodput.items())


def distribution(name: str, values: Sequence[float]) -> Figures:
    """Mean and percentiles."""
    figures = {f"{name}_mean_ms": rounded(float(np.mean(values)))}
    for percent in PERCENTILES:
        figures[f"{name}_p{percent}_ms"] = percentile(values, percent)
    return figures


def percentile(values: Sequence[float], percent: float) -> float:
    return rounded(float(np.percentile(values, percent)))


def rounded(value: float) -> float:
    """Four significant digits: no benchmark has more."""
    return float(f"{value:.4g}")
