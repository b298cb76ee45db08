"""The reference case, small: a promise, a simulated card, and requests made by hand."""

from __future__ import annotations

import zlib

from jaxserve.cards import CARDS
from jaxserve.pages import PagePool
from jaxserve.plan import PLAN_MODELS
from jaxserve.policy import Policy
from jaxserve.request import Request, SamplingParams, ServiceClass
from jaxserve.roofline import Roofline, model_shape
from jaxserve.scheduler import Scheduler
from jaxserve.simulate import Arrival, Outcome, SimulatedDevice, VirtualClock, run
from jaxserve.sla.promised import Promised
from jaxserve.sla.step_time import StepTimeModel, roofline_seed
from jaxserve.workload import Promise

PROMISE = Promise()
ROOFLINE = Roofline(model_shape("8b", PLAN_MODELS["llama-3.1-8b"]), CARDS["a100-80gb"])


def make_policy(promise: Promise = PROMISE, **settings: int) -> Promised:
    return Promised(promise, StepTimeModel(roofline_seed(ROOFLINE)), **settings)


def ask(
    name: str,
    num_prompt: int,
    max_tokens: int = 100,
    *,
    tenant: str = "",
    service_class: ServiceClass = "interactive",
    deadline: float | None = None,
) -> Request:
    """A request whose prompt nobody shares."""
    prompt = (zlib.crc32(name.encode()) >> 1,) * num_prompt
    return Request(
        name,
        prompt,
        SamplingParams(max_tokens),
        service_class=service_class,
        tenant=tenant,
        deadline=deadline,
    )


def make_scheduler(policy: Policy, clock: VirtualClock, **sizes: int) -> Scheduler:
    limits = {"max_rows": 256, "token_budget": 4096, "max_context": 16_384, **sizes}
    num_pages = limits.pop("num_pages", 28_000)
    return Scheduler(PagePool(num_pages, 16), policy=policy, clock=clock, **limits)


def serve(policy: Policy, arrivals: list[Arrival], **sizes: int) -> dict[str, Outcome]:
    """Simulate to the end; outcomes by request id."""
    clock = VirtualClock()
    scheduler = make_scheduler(policy, clock, **sizes)
    arrivals = sorted(arrivals, key=lambda arrival: arrival.at)
    result = run(arrivals, scheduler, SimulatedDevice(ROOFLINE), clock)
    assert scheduler.pool.num_live == 0 and not scheduler.has_work
    return {outcome.arrival.request.request_id: outcome for outcome in result.outcomes}
