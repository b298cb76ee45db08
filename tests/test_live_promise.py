"""A real engine and a promise it cannot keep for everybody: who is let in, who may come again."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import pytest
from engines import TINY
from live import LiveServer, live_server

BURST = 60
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 20


@dataclass(frozen=True)
class Answer:
    """`wait`: the Retry-After of a refusal. `tokens`: of output."""

    number: int
    status: int
    wait: str | None
    tokens: int


@dataclass(frozen=True)
class Burst:
    """Requests sent at once, and one of the refused sent again at its time."""

    answers: list[Answer]
    again: Answer

    @property
    def refused(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status == 429]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Four rows, 16 tokens a step: the burst's prompts alone take hundreds of steps."""
    sizes = ["--max-rows", "4", "--token-budget", "16", "--max-context", "256"]
    promise = ["--ttft-ms", "100", "--tpot-ms", "100"]
    with live_server(str(TINY / "llama-untied"), *sizes, *promise, "--access-log") as server:
        yield server


@pytest.fixture(scope="module")
def burst(server: LiveServer) -> Burst:
    return asyncio.run(send_burst(server.url))


async def send_burst(url: str) -> Burst:
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        answers = await asyncio.gather(*(ask(session, number) for number in range(BURST)))
        soonest = min((a for a in answers if a.wait is not None), key=lambda a: float(a.wait or 0))
        await asyncio.sleep(float(soonest.wait or 0))
        return Burst(answers, await ask(session, soonest.number))


async def ask(session: aiohttp.ClientSession, number: int) -> Answer:
    """Send a request that has no beginning in common with any other."""
    prompt = [3 + number, *range(3, 2 + PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    async with session.post("/v1/completions", json=body) as reply:
        found = await reply.json()
        tokens = found["usage"]["completion_tokens"] if reply.status == 200 else 0
        return Answer(number, reply.status, reply.headers.get("Retry-After"), tokens)


def test_a_burst_is_cut_to_what_can_be_kept(burst):
    served = [answer for answer in burst.answers if answer.status == 200]
    assert served and burst.refused and len(served) + len(burst.refused) == BURST
    assert all(answer.tokens == OUTPUT_TOKENS for answer in served)


def test_the_refused_are_told_when_to_come_again_and_are_served_then(burst):
    for answer in burst.refused:
        assert answer.wait is not None and answer.wait.isdecimal() and 1 <= int(answer.wait) <= 120
    assert (burst.again.status, burst.again.tokens) == (200, OUTPUT_TOKENS)


def test_every_refusal_is_counted_with_its_reason(server, burst):
    found = re.findall(
        r'^jaxserve_refused_total\{reason="(\w+)"\} (\S+)$', server.get("/metrics"), re.MULTILINE
    )
    counts = {reason: float(count) for reason, count in found}
    assert counts == {"late": len(burst.refused)} | dict.fromkeys(
        ("full", "deadline", "pending", "rate"), 0
    )


def test_the_times_of_those_served_are_in_the_histograms(server, burst):
    num_served = BURST - len(burst.refused) + 1
    for name in ("time_to_first_token", "time_per_output_token", "queue"):
        assert server.metric(f"jaxserve_{name}_seconds_count") == num_served
    gaps = server.metric("jaxserve_inter_token_seconds_count")
    assert gaps == num_served * (OUTPUT_TOKENS - 1)
    assert 0 < server.metric("jaxserve_ttft_p95_seconds") < 60
    assert server.metric("jaxserve_running_limit") >= 1


def test_what_is_promised_is_told(server):
    promise = json.loads(server.get("/history"))["promise"]
    assert promise == {"ttft": 0.1, "tpot": 0.1, "percentile": 95.0}


def test_nothing_is_left_behind(server, burst):
    for name in ("pages_live", "running", "waiting", "open_sequences"):
        server.wait_for_metric(f"jaxserve_{name}", 0)
    assert server.metric("jaxserve_compilations_total") == 0


def test_each_request_has_its_line_of_json_in_the_log(server, burst):
    deadline = time.monotonic() + 10
    lines: list[str] = []
    while len(lines) <= BURST and time.monotonic() < deadline:
        lines = [line for line in server.lines if '"path":"/v1/completions"' in line]
        time.sleep(0.05)
    found = [json.loads(line) for line in lines]
    assert [line["status"] for line in found].count(429) == len(burst.refused)
    good = [line for line in found if line["status"] == 200]
    assert len(good) == BURST - len(burst.refused) + 1
    for line in good:
        generated = line["generated"]
        assert generated["prompt_tokens"] == PROMPT_TOKENS
        assert generated["output_tokens"] == OUTPUT_TOKENS
        assert generated["finish_reasons"] == ["length"]
        assert 0 <= generated["queue_seconds"] <= generated["ttft_seconds"] <= line["seconds"]
