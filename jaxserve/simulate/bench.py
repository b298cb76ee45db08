"""One device, one promise, one mix of requests: everything a simulation needs but a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.pages import PagePool
from jaxserve.plan import cache_bytes
from jaxserve.roofline import Roofline
from jaxserve.scheduler import Scheduler
from jaxserve.simulate.arrivals import Arrival, Mix, poisson
from jaxserve.simulate.device import SimulatedDevice
from jaxserve.simulate.loop import VirtualClock, run
from jaxserve.simulate.measure import Measured, measure
from jaxserve.simulate.policies import MakePolicy
from jaxserve.workload import Promise

PAGE_SIZE = 16
PRECISION = 0.03


@dataclass(frozen=True, slots=True)
class Bench:
    """A setting.

    Attributes:
        roofline: the model on the device.
        promise: to keep.
        mix: what requests look like.
        num_requests: of a simulation.
        seed: of its randomness.
        noise: of step times, relative.
        memory_fraction: of the device, for weights and pages.
        max_rows: most sequences in a step.
        token_budget: most tokens in a step.
        trace: requests to take instead of random ones; they are scaled to the rate.
    """

    roofline: Roofline
    promise: Promise
    mix: Mix
    num_requests: int = 4000
    seed: int = 1
    noise: float = 0.0
    memory_fraction: float = 0.9
    max_rows: int = 512
    token_budget: int = 16_384
    trace: Callable[[float], list[Arrival]] | None = None

    def serve(self, make_policy: MakePolicy, rate: float) -> Measured:
        """Simulate one policy at so many requests a second."""
        clock = VirtualClock()
        shape = self.roofline.shape
        memory = cache_bytes(self.roofline, self.memory_fraction)
        num_pages = int(memory / (shape.kv_bytes_per_token * PAGE_SIZE))
        scheduler = Scheduler(
            PagePool(num_pages, PAGE_SIZE),
            max_rows=self.max_rows,
            token_budget=self.token_budget,
            max_context=shape.max_context,
            policy=make_policy(self.roofline, self.promise),
            clock=clock,
        )
        device = SimulatedDevice(self.roofline, noise=self.noise, seed=self.seed)
        return measure(run(self.arrivals(rate), scheduler, device, clock), self.promise)

    def arrivals(self, rate: float) -> list[Arrival]:
        if self.trace is not None:
            return self.trace(rate)
        return poisson(self.mix, self.num_requests, rate, self.seed)


def find_capacity(bench: Bench, make_policy: MakePolicy, *, least: float = 0.5) -> float:
    """The highest rate at which all requests get what was promised and none is refused, to within
    3 percent. 0 if it is below `least`: slow servers take long to simulate."""

    def holds(rate: float) -> bool:
        measured = bench.serve(make_policy, rate)
        return measured.shed == 0 and measured.keeps(bench.promise)

    low, high = 0.0, least
    while holds(high):
        low, high = high, 2 * high
    while low and high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
