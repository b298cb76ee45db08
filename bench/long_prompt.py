"""What a long prompt does to the streams beside it: the gaps between their tokens.

    python -m bench.long_prompt smollm2-135m-instruct --tpot-ms 160 --ttft-ms 60000

Streams decode; after a calm while one long prompt arrives, and the streams' gaps until its first
token are compared with the calm ones. Two engines in one run: with a promise, which sizes what a
step prefills, and with a token budget that takes the whole prompt in one step (chunking off).
"""

from __future__ import annotations

import argparse
import random
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

CALM_TOKENS = 200
"""Tokens each stream gets before the long prompt comes: enough for the promise to have seen that
few prompts come in, and so to leave a row for one more."""


def gaps_around(engine: Engine, vocab_size: int, flags: argparse.Namespace) -> Point:
    """Gaps in ms, calm and beside the prompt, and the prompt's own time to first token."""
    rng = random.Random(0)

    def prompt(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    for i in range(flags.streams):
        engine.add(Request(f"stream{i}", prompt(64), SamplingParams(2000)))
    last: dict[str, float] = {}
    calm: list[float] = []
    beside: list[float] = []
    sent = 0.0
    first = None
    while first is None:
        time.sleep(engine.spare_seconds)
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if event.request_id == "long":
                first = now
            elif event.request_id in last:
                (beside if sent else calm).append(1e3 * (now - last[event.request_id]))
            last[event.request_id] = now
        if not sent and len(calm) >= CALM_TOKENS * flags.streams:
            sent = time.perf_counter()
            long = Request("long", prompt(flags.prompt_tokens), SamplingParams(4))
            if refusal := engine.add(long):
                raise JaxserveError(f"the long prompt was refused: {refusal.message}")
    for name in [*last]:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    calm = calm[10 * flags.streams :]  # while the streams' own prompts were computed
    return {
        "calm_p50_ms": percentile(calm, 50),
        "calm_p99_ms": percentile(calm, 99),
        "beside_p50_ms": percentile(beside, 50),
        "beside_p99_ms": percentile(beside, 99),
        "p99_ratio": rounded(percentile(beside, 99) / percentile(calm, 99)),
        "long_ttft_ms": rounded(1e3 * (first - sent)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.long_prompt", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--store", type=Path, default=default_store_path())
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--tpot-ms", type=float, default=160.0)
    parser.add_argument("--ttft-ms", type=float, default=60_000.0)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(argv)
    for name, budget, promised in (("chunked", 256, True), ("unchunked", 4096, False)):
        config = EngineConfig(
            flags.model,
            flags.store,
            max_rows=flags.streams + 1,
            token_budget=budget,
            max_context=4096,
            tpot_ms=flags.tpot_ms if promised else None,
            ttft_ms=flags.ttft_ms if promised else None,
        )
        try:
            loaded = load_engine(config)
            figures = gaps_around(loaded.engine, loaded.vocab_size, flags)
        except (JaxserveError, CheckpointError) as error:
            print(f"bench.long_prompt: {error}", file=sys.stderr)
            return 1
        point: Point = {"bench": "long_prompt", "engine": name, "streams": flags.streams}
        write_point({**point, **figures, **machine_facts()}, sys.stdout, flags.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
