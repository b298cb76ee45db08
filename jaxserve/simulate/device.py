"""A device that takes as long as a roofline says."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable

from jaxserve.roofline import Roofline, StepWork
from jaxserve.sequence import Span


class SimulatedDevice:
    """Tells how long steps take."""

    def __init__(self, roofline: Roofline, *, noise: float = 0.0, seed: int = 0) -> None:
        """Args:
        roofline: what steps take without noise.
        noise: standard deviation of the logarithm of a step's duration.
        seed: of the noise.
        """
        self._roofline = roofline
        self._layers = Counter(roofline.shape.windows)
        self._noise = noise
        self._draw = random.Random(seed)

    def seconds(self, spans: Iterable[Span]) -> float:
        """Duration of a step."""
        shape = self._roofline.shape
        tokens = drawn = 0
        touched = pairs = 0.0  # of all layers
        for span in spans:
            count = span.num_tokens
            tokens += count
            drawn += span.draws
            for window, num_layers in self._layers.items():
                limit = span.stop if window is None else window
                touched += num_layers * min(span.stop, count + limit - 1)
                pairs += num_layers * (_visible(span.stop, limit) - _visible(span.start, limit))
        flops = 4 * shape.num_heads * shape.head_dim * pairs
        work = StepWork(tokens, drawn, touched * shape.kv_bytes_per_layer, flops)
        return self._roofline.work_seconds(work) * math.exp(self._noise * self._draw.gauss(0, 1))


def _visible(num_tokens: float, window: float) -> float:
    """Pairs of a query and a key it sees, for queries [0, num_tokens)."""
    ramp = min(num_tokens, window)
    return ramp * (ramp + 1) / 2 + (num_tokens - ramp) * window
