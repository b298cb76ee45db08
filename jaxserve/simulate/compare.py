"""Policies side by side: their capacities, and what each does at multiples of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.simulate.bench import Bench, find_capacity
from jaxserve.simulate.measure import Measured
from jaxserve.simulate.policies import MakePolicy
from jaxserve.workload import Promise

OURS = "promise"
COMPARED_AT = 1.5
"""Times our capacity: the load at which the summary compares policies."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out.

    Attributes:
        mix: name of the requests' mix. promise: to keep.
        capacity: requests a second, by policy: the most with every p95 kept and nothing refused.
        loads: multiples of our capacity.
        measured: by policy, one for each load.
    """

    mix: str
    promise: Promise
    capacity: dict[str, float]
    loads: tuple[float, ...]
    measured: dict[str, list[Measured]]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def summary(self) -> dict[str, object]:
        """What most readers look for: our capacity, every policy at one load above it (the one
        nearest to `COMPARED_AT`), and ours at every load."""
        at = min(range(len(self.loads)), key=lambda index: abs(self.loads[index] - COMPARED_AT))
        return {
            "mix": self.mix,
            "capacity_rps": self.capacity[OURS],
            "capacities_rps": self.capacity,
            "policies_at_x": self.loads[at],
            "policies": {name: _figures(of[at]) for name, of in self.measured.items()},
            "loads": [
                {"offered_x": load, **_figures(measured)}
                for load, measured in zip(self.loads, self.measured.get(OURS, ()), strict=False)
            ],
        }


def compare(
    bench: Bench,
    policies: Mapping[str, MakePolicy],
    *,
    loads: Seq[float],
    capacity: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Simulate every policy at every load.

    Args:
        bench: the setting.
        policies: by name; ours is among them unless `capacity` is given.
        loads: multiples of our capacity.
        capacity: ours, if it is known: no capacity is looked for then.
        progress: told before each part.
    """
    capacities: dict[str, float] = {}
    if capacity is None:
        for name, make_policy in policies.items():
            progress(f"{bench.mix.name}: the capacity of {name}")
            capacities[name] = find_capacity(bench, make_policy)
        if OURS not in capacities:
            raise ConfigError(f"without {OURS} among the policies give --capacity")
        capacity = capacities[OURS]
    else:
        capacities[OURS] = capacity
    measured: dict[str, list[Measured]] = {name: [] for name in policies}
    for load in loads:
        progress(f"{bench.mix.name}: {load:g} times the capacity")
        for name, make_policy in policies.items():
            measured[name].append(bench.serve(make_policy, load * capacity))
    return Comparison(bench.mix.name, bench.promise, capacities, tuple(loads), measured)


def _figures(measured: Measured) -> dict[str, float]:
    return {
        "offered_rps": measured.offered,
        "goodput_rps": measured.goodput,
        "ttft_p95_ms": measured.ttft * 1e3,
        "tpot_p95_ms": measured.tpot * 1e3,
        "running_max": measured.rows_max,
        "running_mean": measured.rows,
        "shed": measured.shed,
        "preemptions": measured.preemptions,
    }
