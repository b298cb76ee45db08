"""What prefix reuse saves: requests that begin with one long prompt, page counts and TTFT.

    python -m bench.shared_prompt smollm2-135m-instruct --requests 100 --shared-tokens 2000

First all requests at once: the most pages that were live, against the pages of one copy and of a
copy each. Then one request cold and some warm, each alone: how long until its first token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.measure import Point, machine_facts, percentile, rounded, write_point
from checkpoints import DEFAULT_MODEL, CheckpointError, default_store_path
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.errors import JaxserveError
from jaxserve.request import Request, SamplingParams
from jaxserve.startup import load_engine

OWN_TOKENS = 20
WARM_REQUESTS = 10


def run(engine: Engine, requests: Sequence[Request]) -> tuple[dict[str, float], int]:
    """Seconds to each request's first token, and the most pages that were live."""
    started, most = time.perf_counter(), 0
    first: dict[str, float] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter() - started
        for event in events:
            first.setdefault(event.request_id, now)
        most = max(most, engine.scheduler.pool.num_live)
    return first, most


def measure(engine: Engine, vocab_size: int, flags: argparse.Namespace) -> Point:
    rng = random.Random(flags.seed)
    sampling = SamplingParams(max_tokens=flags.output_tokens)

    def draw(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    def requests(name: str, shared: list[int], count: int) -> list[Request]:
        return [Request(f"{name}{i}", (*shared, *draw(OWN_TOKENS)), sampling) for i in range(count)]

    run(engine, requests("warm-up", draw(flags.shared_tokens), 1))
    pool = engine.scheduler.pool
    _, live = run(engine, requests("crowd", draw(flags.shared_tokens), flags.requests))
    shared = draw(flags.shared_tokens)
    cold, _ = run(engine, requests("cold", shared, 1))
    warm = [run(engine, [each])[0] for each in requests("warm", shared, WARM_REQUESTS)]
    warm_ms = [1e3 * seconds for each in warm for seconds in each.values()]
    one_copy = flags.shared_tokens // pool.page_size
    own = pool.pages_for(flags.shared_tokens % pool.page_size + OWN_TOKENS + flags.output_tokens)
    return {
        "bench": "shared_prompt",
        "model": str(flags.model),
        "requests": flags.requests,
        "shared_tokens": flags.shared_tokens,
        "live_pages_most": live,
        "pages_of_one_copy": one_copy,
        "pages_of_their_own": own * min(flags.requests, engine.scheduler.max_rows),
        "pages_without_reuse": (one_copy + own) * min(flags.requests, engine.scheduler.max_rows),
        "ttft_cold_ms": rounded(1e3 * next(iter(cold.values()))),
        "ttft_warm_p50_ms": rounded(statistics.median(warm_ms)),
        "ttft_warm_p95_ms": percentile(warm_ms, 95),
        **machine_facts(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.shared_prompt", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--store", type=Path, default=default_store_path())
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--shared-tokens", type=int, default=2000)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--max-rows", type=int, default=128)
    parser.add_argument("--token-budget", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(argv)
    config = EngineConfig(
        flags.model, flags.store, max_rows=flags.max_rows, token_budget=flags.token_budget
    )
    try:
        loaded = load_engine(config)
    except (JaxserveError, CheckpointError) as error:
        print(f"bench.shared_prompt: {error}", file=sys.stderr)
        return 1
    write_point(measure(loaded.engine, loaded.vocab_size, flags), sys.stdout, flags.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
