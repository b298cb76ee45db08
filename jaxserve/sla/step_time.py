"""How long a step will take: the roofline's terms, each times a factor learned from real steps.

A roofline says what a step costs at best: the weights read once, arithmetic for every token beyond
those that the reading hides, keys and values read, attention over long prompts. A real device takes
longer, by a factor of its own for each of the four. The factors start at 1 and are fitted to every
step (recursive least squares on relative errors, the newest steps counting most). A step that is
far from what was expected is ignored: the host may have paused. Several in a row are believed, and
everything known is in doubt again, so a seed that is far off is forgotten within some dozen steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from jaxserve.roofline import ModelShape, Roofline, StepWork
from jaxserve.sequence import Span

TERMS = ("weights", "tokens", "kv_reads", "attention")
DOUBT = 0.5
"""Standard deviation of a factor before anything was observed."""
MOST_DOUBT = 2.0
"""The same after steps that nobody expected, as a share of the factor, or of 1 if it is less."""
DRIFT = 0.005
"""Standard deviation of a factor's change from one step to the next."""
NOISE = 0.1
"""Relative standard deviation of a step's duration."""
SURPRISE = 3.0
"""Standard deviations from which a step counts as unexpected."""
SURPRISES = 3
"""Unexpected steps in a row that are believed."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step's duration depends on.

    Attributes:
        tokens: that go through the layers, decodes and prompts together.
        kv_tokens: that its sequences have in the cache, all together.
        pairs: of a prompt token and a token it looks at.
    """

    tokens: float
    kv_tokens: float
    pairs: float = 0.0


def step_load(spans: Iterable[Span]) -> StepLoad:
    """The load of a step."""
    tokens = kv_tokens = 0
    pairs = 0.0
    for span in spans:
        count = span.num_tokens
        tokens += count
        kv_tokens += span.stop
        if count > 1:
            pairs += count * (span.start + span.stop) / 2
    return StepLoad(tokens, kv_tokens, pairs)


@dataclass(frozen=True, slots=True)
class Seed:
    """Seconds at best.

    Attributes:
        floor: of a step, whatever it does.
        token_seconds: of so many tokens in a step, beyond the floor. Never falls.
        per_token: of a token of a long prompt.
        per_kv_token: of a cached token that is read.
        per_pair: of a prompt token looking at another.
    """

    floor: float
    token_seconds: Callable[[float], float]
    per_token: float
    per_kv_token: float
    per_pair: float


def roofline_seed(roofline: Roofline) -> Seed:
    """What the roofline says about a model on a device."""
    shape = roofline.shape
    far = 4096
    read = shape.span(far - 1, far)
    floor = roofline.work_seconds(StepWork(1, 1, 0, 0))
    per_token = roofline.work_seconds(StepWork(1e6, 0, 0, 0)) / 1e6
    hidden = (floor - roofline.overhead) / per_token
    return Seed(
        floor=floor,
        token_seconds=lambda tokens: per_token * max(0.0, tokens - hidden),
        per_token=per_token,
        per_kv_token=read.kv_bytes / far / roofline.card.bandwidth,
        per_pair=read.attention_flops / far / (roofline.mfu * roofline.card.bf16_flops),
    )


def measured_seed(shape: ModelShape, step_seconds: Mapping[int, float]) -> Seed:
    """From steps of the very device.

    The single token's says how fast weights are read, the largest how fast arithmetic is; what
    lies between is no straight line on every device.

    Args:
        shape: of the model.
        step_seconds: of steps by their number of tokens: 1, and at least one more.
    """
    floor, most = step_seconds[1], max(step_seconds)
    per_token = max(1e-9, step_seconds[most] - floor) / most
    bandwidth = shape.read_bytes / floor
    pair_flops = 4 * shape.num_heads * shape.head_dim * len(shape.windows)
    return Seed(
        floor=floor,
        token_seconds=_rising({n: seconds - floor for n, seconds in step_seconds.items()}),
        per_token=per_token,
        per_kv_token=shape.kv_bytes_per_token / bandwidth,
        per_pair=per_token * pair_flops / (2 * shape.layer_params),
    )


def _rising(points: Mapping[int, float]) -> Callable[[float], float]:
    """Straight lines between points, none of them falling; beyond the last as steep as to it."""
    places = sorted(points)
    values = list(accumulate((points[place] for place in places), max))

    def at(place: float) -> float:
        if place >= places[-1]:
            return values[-1] * place / places[-1]
        right = max(1, bisect_right(places, place))
        before, after = places[right - 1], places[right]
        share = (place - before) / (after - before)
        return values[right - 1] + share * (values[right] - values[right - 1])

    return at


def _doubts(deviations: Sequence[float]) -> list[list[float]]:
    """A covariance of independent factors."""
    dims = range(len(deviations))
    return [[deviations[i] ** 2 * (i == j) for j in dims] for i in dims]


class StepTimeModel:
    """Predicts a step's duration. Told of every step.

    Attributes:
        factors: what the roofline's terms are multiplied by, in the order of `TERMS`.
        error: of recent predictions, relative, in absolute value, on average.
    """

    def __init__(
        self, seed: Seed, *, padded: Callable[[float], float] = lambda tokens: tokens
    ) -> None:
        """Args:
        seed: from `roofline_seed`.
        padded: tokens that a step of this many is filled up to: the device works on all of them.
        """
        self._seed = seed
        self._padded = padded
        self.factors = [1.0] * len(TERMS)
        self.error = 0.0
        self._num_steps = 0
        self._surprises: list[float] = []
        # Of the fit: covariance of the factors.
        self._doubt = _doubts([DOUBT] * len(TERMS))

    def predict(self, load: StepLoad) -> float:
        """Seconds."""
        terms = self._terms(load)
        return sum(f * t for f, t in zip(self.factors, terms, strict=True))

    def prompt_seconds(self, start: int, num_tokens: float) -> float:
        """Arithmetic of `num_tokens` tokens of a prompt after its first `start`, alone."""
        _, tokens, _, attention = self.factors
        pairs = num_tokens * (start + num_tokens / 2)
        return tokens * self._seed.per_token * num_tokens + attention * self._seed.per_pair * pairs

    def _terms(self, load: StepLoad) -> tuple[float, float, float, float]:
        seed = self._seed
        return (
            seed.floor,
            seed.token_seconds(self._padded(load.tokens)),
            seed.per_kv_token * load.kv_tokens,
            seed.per_pair * load.pairs,
        )

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step of this load took that long."""
        predicted = self.predict(load)
        self._num_steps += 1
        miss = abs(seconds - predicted) / seconds
        self.error += (miss - self.error) * max(0.02, 1 / self._num_steps)
        # Everything relative to the duration: a long step must not outweigh twenty short ones.
        x = [term / predicted for term in self._terms(load)]
        self._fit(x, (seconds - predicted) / predicted)

    def _fit(self, x: list[float], miss: float) -> None:
        """One step of a Kalman filter: the factors drift, each step measures a sum of them."""
        doubt = self._doubt
        dims = range(len(x))
        for i in dims:
            doubt[i][i] += DRIFT**2
        px = [sum(doubt[i][j] * x[j] for j in dims) for i in dims]
        spread = NOISE**2 + sum(x[i] * px[i] for i in dims)
        if miss**2 > SURPRISE**2 * spread:
            self._be_surprised(miss)
            return
        self._surprises.clear()
        for i in dims:
            # A term may be nearly free, never negative: more work is never predicted to be quicker.
            self.factors[i] = max(0.01, self.factors[i] + px[i] * miss / spread)
            for j in dims:
                doubt[i][j] -= px[i] * px[j] / spread
        for i in dims:  # what no step tells anything about must not grow more doubtful for ever
            most = MOST_DOUBT * max(1.0, self.factors[i])
            if doubt[i][i] > most**2:
                scale = most / math.sqrt(doubt[i][i])
                for j in dims:
                    doubt[i][j] *= scale
                    doubt[j][i] *= scale

    def _be_surprised(self, miss: float) -> None:
        """A step took 1 + `miss` times what was expected. If that goes on, so be it."""
        self._surprises.append(miss)
        if len(self._surprises) < SURPRISES:
            return
        usual = max(0.05, 1 + sorted(self._surprises)[SURPRISES // 2])
        self.factors = [usual * factor for factor in self.factors]
        self._doubt = _doubts([MOST_DOUBT * max(1.0, factor) for factor in self.factors])
        self._surprises.clear()
