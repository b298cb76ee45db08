"""The real scheduler, page pool and promise on a simulated device, over virtual time.

What is simulated is the device alone: a step takes as long as the roofline says, with noise if
wanted. Requests come at random or from a trace. Knows no arrays; minutes of serving take seconds.

    bench = Bench(Roofline(shape, card), Promise(), REFERENCE)
    report = compare(bench, POLICIES, loads=(0.5, 1, 1.5, 3))
"""

from jaxserve.simulate.arrivals import MIXES as MIXES
from jaxserve.simulate.arrivals import REFERENCE as REFERENCE
from jaxserve.simulate.arrivals import Arrival as Arrival
from jaxserve.simulate.arrivals import Mix as Mix
from jaxserve.simulate.arrivals import poisson as poisson
from jaxserve.simulate.arrivals import read_trace as read_trace
from jaxserve.simulate.bench import Bench as Bench
from jaxserve.simulate.bench import find_capacity as find_capacity
from jaxserve.simulate.compare import Comparison as Comparison
from jaxserve.simulate.compare import compare as compare
from jaxserve.simulate.device import SimulatedDevice as SimulatedDevice
from jaxserve.simulate.loop import Outcome as Outcome
from jaxserve.simulate.loop import VirtualClock as VirtualClock
from jaxserve.simulate.loop import run as run
from jaxserve.simulate.measure import Measured as Measured
from jaxserve.simulate.measure import measure as measure
from jaxserve.simulate.policies import POLICIES as POLICIES
