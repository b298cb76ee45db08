"""What to compare the promise with. None of these refuses anybody; memory is their only limit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from jaxserve.policy import Allowance, Load, Policy, Refusal, Report
from jaxserve.request import Request
from jaxserve.roofline import Roofline
from jaxserve.sequence import Sequence, Span
from jaxserve.sla.promised import Promised
from jaxserve.sla.step_time import StepTimeModel, roofline_seed
from jaxserve.workload import Promise

UNCHUNKED_TOKENS = 8192
FIXED_TOKENS = 1024
FIXED_CHUNK = 512


class FirstCome:
    """First come, first served; how much is computed is up to `allow`."""

    device_free = 0.0

    def __init__(self, allow: Callable[[Load], Allowance]) -> None:
        self._allow = allow

    def judge(self, sequence: Sequence, load: Load, now: float) -> Refusal | None:
        return None

    def max_tokens(self, request: Request) -> int:
        return request.sampling.max_tokens

    def plan(self, load: Load, now: float) -> Allowance:
        return self._allow(load)

    def turn(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        return ()

    def observe_launch(self, spans: Collection[Span], now: float) -> None:
        pass

    def observe_step(self, spans: Collection[Span], seconds: float, now: float) -> None:
        pass

    def observe_first_token(self, sequence: Sequence, now: float) -> None:
        pass

    def observe_finish(self, sequence: Sequence, now: float) -> None:
        pass

    def report(self) -> Report:
        return Report()


def static_batching(load: Load) -> Allowance:
    """A batch of all that fits is served to its end, then the next one. Flattered: the rows of
    finished sequences cost nothing here."""
    limit = len(load.running) or load.max_rows
    return Allowance(limit, load.token_budget, load.token_budget, 0.0)


def without_chunking(load: Load) -> Allowance:
    """Whole prompts beside the decodes, as many as make up `UNCHUNKED_TOKENS`, at least one."""
    tokens = 0
    for sequence in (*load.running, *load.waiting):
        if sequence.is_decoding:
            continue
        if tokens and tokens + sequence.num_pending > UNCHUNKED_TOKENS:
            break
        tokens += sequence.num_pending
    return Allowance(load.max_rows, tokens, load.token_budget, 0.0)


def fixed_chunks(load: Load) -> Allowance:
    """Chunks of `FIXED_CHUNK` tokens, steps of `FIXED_TOKENS`."""
    decodes = sum(sequence.is_decoding for sequence in load.running)
    return Allowance(load.max_rows, max(1, FIXED_TOKENS - decodes), FIXED_CHUNK, 0.0)


def promised(roofline: Roofline, promise: Promise) -> Policy:
    """The real thing."""
    return Promised(promise, StepTimeModel(roofline_seed(roofline)))


MakePolicy = Callable[[Roofline, Promise], Policy]
POLICIES: Mapping[str, MakePolicy] = {
    "static": lambda roofline, promise: FirstCome(static_batching),
    "unchunked": lambda roofline, promise: FirstCome(without_chunking),
    "fixed-chunk": lambda roofline, promise: FirstCome(fixed_chunks),
    "promise": promised,
}
