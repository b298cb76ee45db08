"""Clients that come again when a server tells them to: open loop, and closed loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from bench.measure import BenchError, Timeline
from bench.serve import COMPLETIONS, read_stream


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to send. `at`: seconds after the first one."""

    at: float
    body: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One sending of a request.

    Attributes:
        sent, answered: in seconds of one clock; answered: when the 429 or the first token came.
        timeline: of the answer; None for a 429.
        retry_after: seconds, of a 429.
    """

    sent: float
    answered: float
    timeline: Timeline | None
    retry_after: float = 0.0


async def attempt(session: aiohttp.ClientSession, body: bytes) -> Attempt:
    """Send a request, and read the answer or the refusal."""
    sent = time.perf_counter()
    async with session.post(COMPLETIONS, data=body) as response:
        if response.status == 429:
            await response.read()
            wait = float(response.headers["Retry-After"])
            return Attempt(sent, time.perf_counter(), None, wait)
        if response.status != 200:
            raise BenchError(f"status {response.status}: {await response.text()}")
        timeline = await read_stream(response, sent)
    return Attempt(sent, timeline.first, timeline)


async def insist(
    session: aiohttp.ClientSession, body: bytes, retries: int, until: float
) -> list[Attempt]:
    """Send a request, and again when a refusal says so; nothing is sent after `until`."""
    attempts = [await attempt(session, body)]
    while attempts[-1].timeline is None and len(attempts) <= retries:
        wait = attempts[-1].retry_after
        if time.perf_counter() + wait > until:
            await asyncio.sleep(until - time.perf_counter())
            break
        await asyncio.sleep(wait)
        attempts.append(await attempt(session, body))
    return attempts


async def offer(
    session: aiohttp.ClientSession, asks: Sequence[Ask], seconds: float, retries: int
) -> list[list[Attempt]]:
    """Send every request at its time, whatever became of those before; the attempts of each."""
    started = time.perf_counter()
    tasks = []
    for ask in asks:
        await asyncio.sleep(started + ask.at - time.perf_counter())
        again = insist(session, ask.body, retries, started + seconds)
        tasks.append(asyncio.create_task(again))
    return await asyncio.gather(*tasks)


async def saturate(
    session: aiohttp.ClientSession, supply: Iterator[Ask], seconds: float, clients: int
) -> list[Timeline]:
    """As many clients, each with one request after the other; the answers."""
    until = time.perf_counter() + seconds
    answers: list[Timeline] = []

    async def client() -> None:
        while time.perf_counter() < until:
            last = (await insist(session, next(supply).body, 0, until))[-1]
            if last.timeline is not None:
                answers.append(last.timeline)

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers
