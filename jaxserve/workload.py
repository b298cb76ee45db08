"""What is asked of a server, and what it has promised: the two sides of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from jaxserve.errors import ConfigError

_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)


@dataclass(frozen=True, slots=True)
class Promise:
    """Latencies to keep, in seconds.

    Attributes:
        ttft: time to the first token.
        tpot: time per output token after it, a request's mean.
        percentile: of the requests that keep each of the two, at least.
    """

    ttft: float = 0.5
    tpot: float = 0.033
    percentile: float = 95.0

    def __post_init__(self) -> None:
        if min(self.ttft, self.tpot) <= 0:
            raise ConfigError(f"a promise is more than 0 ms, not TTFT {self.ttft}, {self.tpot} s")
        if not 0 < self.percentile < 100:
            raise ConfigError(f"a percentile is between 0 and 100, not {self.percentile:g}")


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of requests in tokens. Both are log-normal through their two percentiles.

    Attributes:
        prompt_p50: half of the prompts are shorter. prompt_p95: so are 95%.
        prompt_max: longer prompts are cut off here.
        output_p50: the same of the outputs. output_p95: likewise.
        context: tokens a running sequence holds on average; None works it out.
    """

    prompt_p50: int = 800
    prompt_p95: int = 4000
    prompt_max: int = 8000
    output_p50: int = 200
    output_p95: int = 600
    context: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt_p50 <= self.prompt_p95 <= self.prompt_max:
            raise ConfigError(
                f"prompt lengths p50 {self.prompt_p50}, p95 {self.prompt_p95} and max "
                f"{self.prompt_max} must not fall"
            )
        if self.output_p50 > self.output_p95:
            raise ConfigError(
                f"output lengths p50 {self.output_p50} and p95 {self.output_p95} must not fall"
            )

    @property
    def prompt_mean(self) -> float:
        sigma = _sigma(self.prompt_p50, self.prompt_p95)
        if sigma == 0:
            return self.prompt_p50
        cut = math.log(self.prompt_max / self.prompt_p50)
        below = self.prompt_p50 * math.exp(sigma**2 / 2) * _NORMAL.cdf((cut - sigma**2) / sigma)
        return below + self.prompt_max * _NORMAL.cdf(-cut / sigma)

    @property
    def output_mean(self) -> float:
        return self.output_p50 * math.exp(_sigma(self.output_p50, self.output_p95) ** 2 / 2)

    @property
    def running_context(self) -> float:
        """Tokens a running sequence holds, on average over sequences and time.

        Its prompt, and half an output: of the outputs that are found running, long ones more often.
        """
        if self.context is not None:
            return self.context
        spread = math.exp(_sigma(self.output_p50, self.output_p95) ** 2)
        return self.prompt_mean + self.output_mean * spread / 2

    @property
    def prompt_per_output(self) -> float:
        """Prompt tokens that come in for every token that goes out."""
        return self.prompt_mean / self.output_mean


def _sigma(p50: int, p95: int) -> float:
    return math.log(p95 / p50) / _Z95
