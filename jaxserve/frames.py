"""The frames that cross the socket between the server and the worker process.

A frame is a 4-byte big-endian length, then one msgpack map whose `type` names the class below.
Both directions are asynchronous: nothing waits for an answer. Knows neither text nor arrays.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from jaxserve.request import Request, TokenEvent

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 256 << 20

Phase = Literal["waiting", "prefill", "decode", "preempted"]
"""A sequence waits for its turn, computes its prompt, draws tokens, or waits to get back the pages
it lost."""


class Submit(msgspec.Struct, frozen=True, tag="submit", tag_field="type"):
    """Server to worker: start these requests."""

    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, tag="abort", tag_field="type"):
    """Server to worker: nobody waits for these any more. Unknown ids are fine."""

    request_ids: tuple[str, ...]


class Inspect(msgspec.Struct, frozen=True, tag="inspect", tag_field="type"):
    """Server to worker: somebody looks, so say what every sequence is doing. See Inspection."""


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="type"):
    """Worker to server, before Ready: what start-up is busy with, for a person to read."""

    message: str
    done: int = 0
    total: int = 0


class PromisedTimes(msgspec.Struct, frozen=True):
    """What the worker promises, in seconds.

    Attributes:
        ttft: to the first token. tpot: per token after it, a request's mean.
        percentile: of the requests that keep each of the two.
    """

    ttft: float
    tpot: float
    percentile: float


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="type"):
    """Worker to server, once: requests are welcome.

    Attributes:
        vocab_size: token ids are in [0, vocab_size).
        max_context: most tokens, prompt and output together, one request may hold.
        description: the device and the sizes chosen, for logs.
        longest_step: seconds the largest step took at start-up. No heartbeat comes within a step.
        promise: None promises nothing.
    """

    vocab_size: int
    max_context: int
    description: str
    longest_step: float = 0.0
    promise: PromisedTimes | None = None


class Events(msgspec.Struct, frozen=True, tag="events", tag_field="type"):
    """Worker to server: what one step produced."""

    events: tuple[TokenEvent, ...]


class Stats(msgspec.Struct, frozen=True, tag="stats", tag_field="type"):
    """Worker to server, at least once a second: the heartbeat, and the gauges of /metrics.

    Attributes:
        running: sequences with pages. waiting: sequences without.
        pages_total: pages that can be allocated (the null page is not one of them).
        pages_live: held by a sequence. pages_cached: free, but their content can be reused.
        steps, prompt_tokens, output_tokens, preemptions, compilations: totals since Ready.
            `compilations` counts compilations after Ready and stays 0.
        swaps: preemptions that kept their pages in host memory; the others recompute them.
        asked_tokens: of prompts that got a first token. found_tokens: those that were computed
            already, for others. Totals.
        rows: of the last step.
        step_seconds: duration of the last step. predicted_seconds: of the one in flight.
        prediction_error: of step times, relative, on average.
        step_factors: what the device's roofline is multiplied by, by term.
        step_tokens: computed, prompts and decodes: a total. token_budget: most in a step.
        gap_seconds: that the device waited for the host: a total.
        running_limit: sequences that may run; 0 is no limit but memory.
        rung: of the degradation ladder, 0 to 2.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_live: int = 0
    pages_cached: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    asked_tokens: int = 0
    found_tokens: int = 0
    rows: int = 0
    compilations: int = 0
    step_seconds: float = 0.0
    predicted_seconds: float = 0.0
    prediction_error: float = 0.0
    step_factors: dict[str, float] = {}
    step_tokens: int = 0
    token_budget: int = 0
    gap_seconds: float = 0.0
    running_limit: int = 0
    rung: int = 0


class SequenceState(msgspec.Struct, frozen=True, array_like=True):
    """What a sequence is doing.

    Attributes:
        request_id: whose.
        phase: see Phase.
        num_computed: tokens whose keys and values are in the cache.
        pages: it holds. preemptions: how often it lost them.
    """

    request_id: str
    phase: Phase
    num_computed: int = 0
    pages: int = 0
    preemptions: int = 0


class Inspection(msgspec.Struct, frozen=True, tag="inspection", tag_field="type"):
    """Worker to server, once for each Inspect: every sequence it has."""

    sequences: tuple[SequenceState, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="type"):
    """Worker to server, last frame: why this worker is about to exit.

    Attributes:
        final: another worker would fail the same way, as with a wrong setting.
    """

    message: str
    final: bool = False


ToWorker = Submit | Abort | Inspect
FromWorker = Progress | Ready | Events | Stats | Inspection | Failed

_encoder = msgspec.msgpack.Encoder()
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def encode_frame(frame: ToWorker | FromWorker) -> bytes:
    """Length prefix and body. Raises ValueError for a body over MAX_FRAME_BYTES."""
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body
