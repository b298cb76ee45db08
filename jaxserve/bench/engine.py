"""The engine in this process: one batch's latency, and the throughput of many prompts."""

from __future__ import annotations

import random
import time

from jaxserve.bench.figures import Figures, percentile, rounded
from jaxserve.errors import JaxserveError
from jaxserve.offline.llm import LLM

WARM_UP_TOKENS = 8


def random_bodies(
    llm: LLM, number: int, *, prompt_tokens: int, output_tokens: int, seed: int
) -> list[dict[str, object]]:
    """Greedy requests for exactly so many tokens. No two prompts are alike."""
    rng = random.Random(seed)
    fixed = {"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    return [
        {"prompt": [rng.randrange(llm.vocab_size) for _ in range(prompt_tokens)], **fixed}
        for _ in range(number)
    ]


def run_bodies(llm: LLM, bodies: list[dict[str, object]]) -> float:
    """Answer them all; the seconds it took. Raises what keeps one from being answered."""
    made = [llm.plan(body) for body in bodies]
    started = time.perf_counter()
    for _, outcome in llm.complete(made):
        if isinstance(outcome, JaxserveError):
            raise outcome
    return time.perf_counter() - started


def measure_latency(
    llm: LLM, *, batch_size: int, prompt_tokens: int, output_tokens: int, repeats: int, seed: int
) -> Figures:
    """Seconds from a batch's prompts to its last token, after a round to warm up."""

    def batch(number: int, length: int) -> list[dict[str, object]]:
        return random_bodies(
            llm, batch_size, prompt_tokens=prompt_tokens, output_tokens=length, seed=seed + number
        )

    run_bodies(llm, batch(0, min(WARM_UP_TOKENS, output_tokens)))
    times = [run_bodies(llm, batch(i, output_tokens)) * 1e3 for i in range(1, repeats + 1)]
    return {
        "batch_size": batch_size,
        "repeats": repeats,
        "latency_p50_ms": percentile(times, 50),
        "latency_min_ms": rounded(min(times)),
        "latency_max_ms": rounded(max(times)),
        "output_tokens_per_s": rounded(batch_size * output_tokens / percentile(times, 50) * 1e3),
    }


def measure_throughput(
    llm: LLM, *, requests: int, prompt_tokens: int, output_tokens: int, seed: int
) -> Figures:
    """Tokens a second while all prompts are there at once, after a few to warm up."""
    sizes = {"prompt_tokens": prompt_tokens, "seed": seed}
    run_bodies(llm, random_bodies(llm, 2, output_tokens=WARM_UP_TOKENS, **sizes))
    sizes["seed"] += 1
    seconds = run_bodies(llm, random_bodies(llm, requests, output_tokens=output_tokens, **sizes))
    return {
        "requests": requests,
        "seconds": rounded(seconds),
        "requests_per_s": rounded(requests / seconds),
        "output_tokens_per_s": rounded(requests * output_tokens / seconds),
        "total_tokens_per_s": rounded(requests * (prompt_tokens + output_tokens) / seconds),
    }
