"""From a roofline, a workload and a promise to a plan."""

from __future__ import annotations

import dataclasses

from jaxserve.errors import ConfigError
from jaxserve.plan.load import Load
from jaxserve.plan.notes import plan_notes
from jaxserve.plan.result import Limits, Plan
from jaxserve.plan.sums import max_sequences
from jaxserve.roofline import Roofline
from jaxserve.workload import Promise, Workload

STEP_RESERVE_BYTES = 512 << 20
"""Left free beside weights and cache, for a step's temporaries and the runtime."""


def make_plan(
    roofline: Roofline,
    workload: Workload,
    promise: Promise,
    *,
    memory_fraction: float = 0.9,
    kv_memory: float | None = None,
    min_prefill: int | None = None,
) -> Plan:
    """Work out what a card can do for a workload within a promise.

    Args:
        roofline: predicts steps.
        workload: lengths of what is asked.
        promise: what to keep.
        memory_fraction: share of the card's memory for weights, cache and temporaries.
        kv_memory: bytes of cache, instead of what that leaves.
        min_prefill: prompt tokens every step must have room for. None takes as many as come in
            while the running sequences draw their tokens, so that prompts do not pile up.

    Raises:
        ConfigError: the weights do not fit the card.
    """
    if kv_memory is None:
        kv_memory = cache_bytes(roofline, memory_fraction)
    load = Load(roofline, workload, promise, min_prefill)
    plan = _write_down(load, kv_memory)
    return dataclasses.replace(plan, notes=plan_notes(plan, load))


def _write_down(load: Load, kv_memory: float) -> Plan:
    """The plan, but for its notes."""
    roofline, workload, shape = load.roofline, load.workload, load.roofline.shape
    context = workload.running_context
    limits = load.limits(max_sequences(kv_memory, shape.kv_bytes_per_token, context))
    chunk = load.room(limits.admission)
    prompts = sorted({workload.prompt_p50, workload.prompt_p95, workload.prompt_max})
    return Plan(
        model=shape.name,
        num_params=shape.num_params,
        weight_dtype=shape.weight_dtype,
        weight_bytes=shape.weight_bytes,
        kv_dtype=shape.kv_dtype,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        card=roofline.card,
        mfu=roofline.mfu,
        overhead_seconds=roofline.overhead,
        weights_only=roofline.weights_only,
        workload=workload,
        promise=load.promise,
        context=context,
        kv_memory_bytes=kv_memory,
        floor_seconds=roofline.step_seconds(1),
        single_tokens_per_second=1 / load.seconds(1),
        compute_bound_rows=roofline.compute_bound_rows,
        limits=limits,
        prefill_share=load.share(limits.admission),
        chunk=chunk,
        token_budget=limits.admission + chunk,
        requests_per_second=load.requests_per_second(limits.admission),
        batches=tuple(load.batch_point(rows) for rows in _batch_sizes(roofline, limits)),
        prefills=tuple(load.prefill_point(tokens, limits.admission) for tokens in prompts),
        notes=(),
    )


def cache_bytes(roofline: Roofline, memory_fraction: float) -> float:
    """Memory left for keys and values. Raises ConfigError if there is none."""
    total, weights = roofline.card.memory_bytes, roofline.shape.weight_bytes
    left = memory_fraction * total - weights - STEP_RESERVE_BYTES
    if left <= 0:
        raise ConfigError(
            f"{weights / 1e9:.1f} GB of weights leave no room for a cache in {memory_fraction:.0%} "
            f"of the {total / 1e9:.1f} GB of {roofline.card.name}: choose a larger card, a "
            "smaller model, or int8 weights"
        )
    return left


def _batch_sizes(roofline: Roofline, limits: Limits) -> list[int]:
    """Powers of two and the places where something changes, as far as is worth looking."""
    top = max(1, min(limits.memory, 4 * limits.decode_only))
    places = [2**i for i in range(top.bit_length())]
    places += [roofline.compute_bound_rows, top]
    places += [limits.memory, limits.decode_only, limits.admission, limits.ttft]
    return sorted({rows for rows in places if 1 <= rows <= top})
