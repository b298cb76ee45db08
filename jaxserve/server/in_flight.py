"""GET /requests: what runs and what waits. POST /requests/ID/abort ends one of them."""

from __future__ import annotations

from time import perf_counter

import msgspec
from aiohttp import web

from jaxserve.frames import Phase, SequenceState
from jaxserve.request import ServiceClass
from jaxserve.server.answer import IN_FLIGHT, Answer
from jaxserve.server.auth import CALLER
from jaxserve.server.failures import failure
from jaxserve.server.keys import Caller
from jaxserve.server.replies import never_stored
from jaxserve.server.service import SERVICE

PHASES: tuple[Phase, ...] = ("decode", "prefill", "preempted", "waiting")
"""A request with several choices is as far as the one that is farthest."""


class InFlight(msgspec.Struct, frozen=True):
    """One request that has not been answered to its end. Sums over its choices, unless said.

    Attributes:
        id: of its answer.
        state: of its farthest choice; None if the worker has not said, being in a long step.
        chat, stream: how it was asked for.
        service_class: interactive or batch. tenant: `user`, or what stands for the API key.
        choices: sequences. open: of them, those unfinished.
        prompt_tokens: of each prompt, once. cached_tokens: that need not be computed.
        output_tokens: generated. max_tokens: to generate at most.
        computed_tokens: in the cache. pages: they take. Both None as `state` is.
        preemptions: times that choices lost their pages.
        age_seconds: since it came. ttft_seconds: from then to its first token; None before.
    """

    id: str
    state: Phase | None
    chat: bool
    stream: bool
    service_class: ServiceClass
    tenant: str
    choices: int
    open: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    computed_tokens: int | None
    pages: int | None
    preemptions: int
    age_seconds: float
    ttft_seconds: float | None


class InFlightList(msgspec.Struct, frozen=True):
    """Oldest first."""

    requests: list[InFlight]


class Aborted(msgspec.Struct, frozen=True):
    """What was ended, and how many of its sequences were unfinished."""

    id: str
    aborted: int


async def list_requests(http: web.Request) -> web.Response:
    """GET /requests: those of the key that asks; all of them where no keys are asked for."""
    states = await http.app[SERVICE].client.inspect()
    now, caller = perf_counter(), http[CALLER]
    answers = [a for a in http.app[IN_FLIGHT].values() if may_see(caller, a)]
    return never_stored(InFlightList([describe(answer, states, now) for answer in answers]))


def may_see(caller: Caller, answer: Answer) -> bool:
    """Whether an answer is any business of somebody's, to look at or to end."""
    return not caller.has_key or caller.name == answer.caller.name


def describe(answer: Answer, states: dict[str, SequenceState], now: float) -> InFlight:
    """One line of the list. `states` are what the worker says, by request id."""
    summary = answer.summary()
    requests = answer.generation.requests
    told = [states[r.request_id] for r in requests if r.request_id in states]
    return InFlight(
        id=summary.answer_id,
        state=min((s.phase for s in told), key=PHASES.index, default=None),
        chat=answer.generation.chat,
        stream=summary.stream,
        service_class=requests[0].service_class,
        tenant=summary.tenant,
        choices=summary.choices,
        open=len(answer.inbox.open_ids),
        prompt_tokens=summary.prompt_tokens,
        cached_tokens=summary.cached_tokens,
        output_tokens=summary.output_tokens,
        max_tokens=sum(request.sampling.max_tokens for request in requests),
        computed_tokens=sum(s.num_computed for s in told) if told else None,
        pages=sum(s.pages for s in told) if told else None,
        preemptions=sum(s.preemptions for s in told),
        age_seconds=round(now - answer.inbox.timelines[0].arrived, 3),
        ttft_seconds=None if summary.ttft_seconds is None else round(summary.ttft_seconds, 6),
    )


async def abort_request(http: web.Request) -> web.Response:
    """POST /requests/ID/abort: its client gets what there is, with the finish reason "abort"."""
    name = http.match_info["id"]
    answer = http.app[IN_FLIGHT].get(name)
    if answer is None or not may_see(http[CALLER], answer):
        return failure(404, f"no request {name[:80]!r} is in flight")
    aborted = len(answer.inbox.open_ids)
    http.app[SERVICE].client.end(answer.inbox)
    return never_stored(Aborted(name, aborted))
