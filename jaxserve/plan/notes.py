"""What a plan's numbers do not say by themselves."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.plan.load import Load
from jaxserve.plan.result import Plan


def plan_notes(plan: Plan, load: Load) -> tuple[str, ...]:
    """Sentences for people, most important first."""
    return tuple(_notes(plan, load))


def _notes(plan: Plan, load: Load) -> Iterator[str]:
    limits, promise, longest = plan.limits, plan.promise, plan.workload.prompt_max
    if limits.admission == 0:
        alone = load.seconds(1, load.share(1))
        reason = (
            f"the cache holds no sequence of {plan.context:,.0f} tokens"
            if limits.memory == 0
            else f"a step for one sequence and its prefill share takes {_ms(alone)}, "
            f"over the TPOT of {_ms(promise.tpot)}"
        )
        yield f"The promise cannot be kept: {reason}."
    yield from _optimism(plan, load)
    yield from _ttft(plan, load)
    if 0 < limits.admission == limits.memory:
        yield "Memory, not TPOT, sets the admission limit: a smaller cache type would raise it."
    needed = longest + plan.workload.output_p95
    if needed > load.roofline.shape.max_context:
        yield (
            f"The longest prompts and outputs need {needed:,} tokens; the model was made for "
            f"{load.roofline.shape.max_context:,}."
        )
    yield (
        f"Assumed: full memory bandwidth, {plan.mfu:.0%} of peak FLOP/s, "
        f"{_ms(plan.overhead_seconds)} of overhead a step. Measure, then give --bandwidth, --mfu "
        "and --overhead."
    )


def _optimism(plan: Plan, load: Load) -> Iterator[str]:
    """Where a picture of weights alone is wrong."""
    rows = plan.limits.memory
    if rows == 0:
        return
    reads = load.roofline.attention_seconds(load.decode(rows))
    yield (
        f"The weights-only picture is optimistic: at the {rows:,} sequences of {plan.context:,.0f} "
        f"tokens that fit in memory, KV reads alone take {_ms(reads)} a step, beside "
        f"{_ms(plan.floor_seconds)} for the weights."
    )


def _ttft(plan: Plan, load: Load) -> Iterator[str]:
    """Whether a p95 prompt keeps TTFT beside the admitted sequences."""
    p95, limit = plan.workload.prompt_p95, plan.limits.admission
    point = next(point for point in plan.prefills if point.tokens == p95)
    if limit == 0:
        return
    if point.ttft_seconds is not None and point.ttft_seconds <= plan.promise.ttft:
        yield (
            f"A {p95:,}-token prompt that nobody waits before keeps TTFT beside {limit:,} "
            f"sequences: {_ms(point.ttft_seconds)}."
        )
        return
    took = "never gets a turn" if point.ttft_seconds is None else f"takes {_ms(point.ttft_seconds)}"
    remedy = (
        f"at {plan.limits.ttft:,} sequences or fewer it is met"
        if plan.limits.ttft
        else f"even alone its prefill takes {_ms(point.alone_seconds)}"
    )
    yield (
        f"Beside {limit:,} sequences a {p95:,}-token prompt {took}, over the TTFT of "
        f"{_ms(plan.promise.ttft)}; {remedy}, with {load.ttft_share:,} prompt tokens in each step "
        "while it lasts."
    )


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 or value == 0 else f"{value:.1f} ms"
