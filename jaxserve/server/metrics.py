"""What /metrics shows: latencies as clients see them, and the worker's own numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxserve.frames import PromisedTimes, Stats
from jaxserve.server.window import Window

# Dense around the promise: half a second to the first token, 33 ms for each one after it.
FIRST_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.85,
    1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
NEXT_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.023, 0.026, 0.028, 0.03, 0.032, 0.033, 0.034,
    0.036, 0.04, 0.045, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip

GAUGES = {
    "running": "Sequences that hold pages.",
    "rows": "Batch size: sequences in the last step.",
    "waiting": "Sequences that wait for pages.",
    "pages_total": "Pages of the cache that can be allocated.",
    "pages_live": "Pages held by a sequence.",
    "pages_cached": "Free pages whose content can be reused.",
    "step_seconds": "Duration of the worker's last step.",
    "predicted_seconds": "Duration the worker expects of the step in flight.",
    "prediction_error": "Relative error of that, on average.",
    "token_budget": "Most tokens in a step.",
    "running_limit": "Sequences that may run within the promise. 0: only memory limits them.",
    "rung": "Degradation: 0 none, 1 shorter answers, 2 refusing requests.",
}
COUNTERS = {
    "steps": "Steps since the worker became ready.",
    "prompt_tokens": "Prompt tokens computed.",
    "output_tokens": "Tokens generated.",
    "asked_tokens": "Tokens of prompts that got their first token.",
    "found_tokens": "Those of them that were in the cache already.",
    "compilations": "Compilations after ready. Stays 0.",
    "step_tokens": "Tokens computed, prompts and decodes.",
    "gap_seconds": "Seconds the device waited for the host although there was work.",
}
REFUSALS = ("late", "full", "deadline", "pending", "rate")
"""Why sequences are refused: the promise, the queue, their own deadline, --max-pending, or, whole
requests, the limits of their API key."""


class Timeline:
    """When things happened to one sequence, in seconds of `perf_counter`.

    Attributes:
        arrived: its HTTP request came in.
        submitted: it was handed to the worker.
        admitted: the worker let it run.
        first, last: its first and newest tokens came from the worker.
        num_tokens: so far.
        promised: it is of the class whose times are promised; the batch class waits for the others.
    """

    __slots__ = ("admitted", "arrived", "first", "last", "num_tokens", "promised", "submitted")

    def __init__(self, arrived: float, submitted: float, *, promised: bool = True) -> None:
        self.arrived = arrived
        self.submitted = submitted
        self.promised = promised
        self.admitted = self.first = self.last = 0.0
        self.num_tokens = 0

    @property
    def per_token(self) -> float:
        """Seconds per token after the first; 2 tokens or more must have come."""
        return (self.last - self.first) / (self.num_tokens - 1)


class Metrics:
    """The numbers of one server, in a registry of their own.

    Attributes:
        worker: the worker's newest Stats. heard: when they came, in seconds of `perf_counter`.
        promise: what the worker keeps; None while it promises nothing.
        ttft, tpot: times of the last minute, of sequences whose times are promised.
        requests: finished HTTP requests by endpoint and outcome.
        broken_streams: those among them whose status said 200 and whose end was an error.
        key_requests: those of each API key by outcome, where keys are asked for.
        refused: sequences not let in, or given up for their deadline, by reason.
    """

    def __init__(self, *, open_sequences: Callable[[], int]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        self.worker = Stats()
        self.heard = 0.0
        self.promise: PromisedTimes | None = None
        self.ttft = Window()
        self.tpot = Window()
        self._registry = registry
        self._first_token = self._histogram(
            "jaxserve_time_to_first_token_seconds",
            "From the arrival of a request to the first token of each of its sequences.",
            FIRST_TOKEN_BUCKETS,
        )
        self._per_token = self._histogram(
            "jaxserve_time_per_output_token_seconds",
            "Mean time per token after the first, one value per finished sequence.",
            NEXT_TOKEN_BUCKETS,
        )
        self._between_tokens = self._histogram(
            "jaxserve_inter_token_seconds",
            "Time between neighbouring tokens of a sequence.",
            NEXT_TOKEN_BUCKETS,
        )
        self._queue = self._histogram(
            "jaxserve_queue_seconds",
            "From the arrival of a request until each of its sequences was let run.",
            FIRST_TOKEN_BUCKETS,
        )
        self._server_queue = self._histogram(
            "jaxserve_server_queue_seconds",
            "From the arrival of a request until its sequences were handed to the worker.",
            FIRST_TOKEN_BUCKETS,
        )
        self.requests = Counter(
            "jaxserve_requests",
            "Finished HTTP requests.",
            ("endpoint", "outcome"),
            registry=registry,
        )
        self.key_requests = Counter(
            "jaxserve_key_requests",
            "Finished HTTP requests of each API key.",
            ("key", "outcome"),
            registry=registry,
        )
        self._key_tokens = Counter(
            "jaxserve_key_tokens",
            "Tokens of each API key, of prompts and generated.",
            ("key", "kind"),
            registry=registry,
        )
        self.broken_streams = Counter(
            "jaxserve_broken_streams",
            "Streams that ended with an error event, or whose client stopped reading.",
            registry=registry,
        )
        self.refused = Counter(
            "jaxserve_refused",
            "Sequences not let in, or given up for their deadline.",
            ("reason",),
            registry=registry,
        )
        for reason in REFUSALS:
            self.refused.labels(reason)  # visible from the start
        open_gauge = Gauge(
            "jaxserve_open_sequences", "Sequences accepted and unfinished.", registry=registry
        )
        open_gauge.set_function(open_sequences)
        registry.register(self)  # for what `collect` yields

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, registry=self._registry, buckets=buckets)

    def collect(self) -> Iterator[Metric]:
        """The worker's numbers, as prometheus-client wants them."""
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"jaxserve_{name}", text, value=getattr(self.worker, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"jaxserve_{name}", text, value=getattr(self.worker, name))
        yield from self._labelled()
        yield from self._derived()
        if self.promise is not None:
            yield from promised(self.promise)

    def _labelled(self) -> Iterator[Metric]:
        worker = self.worker
        preemptions = CounterMetricFamily(
            "jaxserve_preemptions", "Sequences that lost their pages.", labels=("way",)
        )
        preemptions.add_metric(("swap",), worker.swaps)
        preemptions.add_metric(("recompute",), worker.preemptions - worker.swaps)
        factors = GaugeMetricFamily(
            "jaxserve_step_factor",
            "What the roofline's terms are multiplied by to predict a step.",
            labels=("term",),
        )
        for term, factor in worker.step_factors.items():
            factors.add_metric((term,), factor)
        yield preemptions
        yield factors

    def _derived(self) -> Iterator[Metric]:
        worker, now = self.worker, perf_counter()
        room = worker.steps * worker.token_budget
        for name, text, part, whole in (
            ("budget_use", "Tokens computed, by those that all steps had room for.",
             worker.step_tokens, room),
            ("prefill_per_decode", "Prompt tokens computed, by tokens generated.",
             worker.prompt_tokens, worker.output_tokens),
            ("prefix_hit_rate", "Share of the prompts' tokens that was in the cache already.",
             worker.found_tokens, worker.asked_tokens),
            ("kv_use", "Share of the pages that sequences hold.",
             worker.pages_live, worker.pages_total),
        ):  # fmt: skip
            yield GaugeMetricFamily(f"jaxserve_{name}", text, value=part / max(1, whole))
        for name, text, window in (
            ("ttft_p95", "p95 time to first token", self.ttft),
            ("tpot_p95", "p95 of sequences' mean time per token after it", self.tpot),
        ):
            text = f"Exact {text}, of the last minute, without the batch class."
            p95 = window.percentile(95, now)
            yield GaugeMetricFamily(f"jaxserve_{name}_seconds", text, value=p95)

    def heard_from_worker(self, stats: Stats, now: float) -> None:
        """The worker said how it is, or is a new one that has said nothing."""
        self.worker, self.heard = stats, now

    def refusals(self) -> dict[str, int]:
        """Sequences not let in so far, by reason."""
        (family,) = self.refused.collect()
        totals = (sample for sample in family.samples if sample.name.endswith("_total"))
        return {sample.labels["reason"]: int(sample.value) for sample in totals}

    def submitted(self, arrived: float, now: float) -> None:
        """A request was handed to the worker."""
        self._server_queue.observe(now - arrived)

    def token(self, timeline: Timeline, now: float, queued: float = 0.0) -> None:
        """A sequence got a token. `queued`: seconds it had waited in the worker, with the first."""
        if timeline.num_tokens == 0:
            timeline.first = now
            timeline.admitted = timeline.submitted + queued
            self._queue.observe(timeline.admitted - timeline.arrived)
            self._first_token.observe(now - timeline.arrived)
            if timeline.promised:
                self.ttft.add(now - timeline.arrived, now)
        else:
            self._between_tokens.observe(now - timeline.last)
        timeline.last = now
        timeline.num_tokens += 1

    def finished(self, timeline: Timeline) -> None:
        """A sequence got its last token."""
        if timeline.num_tokens > 1:
            self._per_token.observe(timeline.per_token)
            if timeline.promised:
                self.tpot.add(timeline.per_token, timeline.last)

    def used(self, key: str, prompt_tokens: int, output_tokens: int) -> None:
        """A request of this API key has ended."""
        self._key_tokens.labels(key, "prompt").inc(prompt_tokens)
        self._key_tokens.labels(key, "output").inc(output_tokens)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)


def promised(promise: PromisedTimes) -> Iterator[Metric]:
    """The limits, to draw them next to what was measured."""
    for name, text, value in (
        ("ttft_promised_seconds", "Promised time to first token.", promise.ttft),
        ("tpot_promised_seconds", "Promised mean time per token after it.", promise.tpot),
        ("promised_share", "Share of the requests that keep each.", promise.percentile / 100),
    ):
        yield GaugeMetricFamily(f"jaxserve_{name}", text, value=value)
