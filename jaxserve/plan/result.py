"""What a plan says. Bytes, seconds and tokens throughout."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from jaxserve.cards import Card, Dtype
from jaxserve.workload import Promise, Workload


@dataclass(frozen=True, slots=True)
class Limits:
    """The most sequences running at once, by what stops the next one.

    Attributes:
        memory: their keys and values fill the cache.
        decode_only: TPOT, if steps did nothing but decode.
        admission: TPOT, with the minimum prefill share in every step; never more than `memory`.
            The number to run with.
        ttft: TPOT, in the steps that prefill a p95 prompt fast enough for TTFT.
    """

    memory: int
    decode_only: int
    admission: int
    ttft: int


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """Steps at one batch size.

    Attributes:
        rows: sequences decoding.
        without_kv_seconds: a decode step, keys and values left out.
        decode_seconds: with them read.
        tpot_seconds: of a step that carries the minimum prefill share too: what a user sees.
        prefill_left: prompt tokens a step can take before it reaches the promised TPOT.
        tokens_per_second: drawn at `tpot_seconds` a step.
    """

    rows: int
    without_kv_seconds: float
    decode_seconds: float
    tpot_seconds: float
    prefill_left: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A prompt.

    Attributes:
        tokens: its length.
        alone_seconds: its prefill in one step, the card to itself.
        ttft_seconds: in chunks beside as many decodes as are admitted, and after the step that was
            running when it came. None: they leave no room. No other prompt waits before it.
    """

    tokens: int
    alone_seconds: float
    ttft_seconds: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What `make_plan` found. `to_json` writes the same fields.

    Attributes:
        model: its name.
        num_params: of it.
        weight_dtype: of its weights.
        weight_bytes: they take.
        kv_dtype: of the cache.
        kv_bytes_per_token: it takes.
        card: the device, with the rates that were used.
        mfu: share of its FLOP/s that is reached.
        overhead_seconds: of every step.
        weights_only: the textbook's picture: steps read weights, and no keys and values.
        workload: what is asked.
        promise: what was promised.
        context: tokens a running sequence holds on average.
        kv_memory_bytes: for the cache.
        floor_seconds: a decode step of one sequence, keys and values left out.
        single_tokens_per_second: the most one sequence alone can get.
        compute_bound_rows: decoding rows from which arithmetic outlasts reading the weights.
        limits: on running sequences.
        prefill_share: minimum prefill tokens of a step at the admission limit.
        chunk: prefill tokens of a step that TPOT leaves over at the admission limit.
        token_budget: admission limit and chunk together.
        requests_per_second: that come and go at the admission limit.
        batches: by batch size.
        prefills: by prompt length.
        notes: what the numbers do not say by themselves, a sentence or two each.
    """

    model: str
    num_params: int
    weight_dtype: Dtype
    weight_bytes: int
    kv_dtype: Dtype
    kv_bytes_per_token: int
    card: Card
    mfu: float
    overhead_seconds: float
    weights_only: bool
    workload: Workload
    promise: Promise
    context: float
    kv_memory_bytes: float
    floor_seconds: float
    single_tokens_per_second: float
    compute_bound_rows: int
    limits: Limits
    prefill_share: int
    chunk: int
    token_budget: int
    requests_per_second: float
    batches: tuple[BatchPoint, ...]
    prefills: tuple[PrefillPoint, ...]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()
