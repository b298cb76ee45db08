"""Sends a load to a server and notes what comes when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from jaxserve.bench.figures import Answer
from jaxserve.bench.load import Ask
from jaxserve.client.asynchronous import AsyncClient
from jaxserve.errors import JaxserveError
from jaxserve.token_stream import End


async def drive(
    client: AsyncClient,
    asks: Sequence[Ask],
    *,
    chat: bool,
    max_concurrency: int | None,
    ignore_eos: bool,
    on_answer: Callable[[int], None],
) -> tuple[list[Answer], float]:
    """The answers, and the seconds from the first request to the end of the last.

    Every request is sent when it is due, whatever became of those before. With a `max_concurrency`
    it waits until fewer are on their way; a latency counts from the sending.
    """
    gate = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    done = 0

    async def send(ask: Ask) -> Answer:
        nonlocal done
        async with gate:
            answer = await measure(client, ask, chat=chat, ignore_eos=ignore_eos)
        done += 1
        on_answer(done)
        return answer

    started = time.perf_counter()
    tasks = []
    for ask in asks:
        await asyncio.sleep(max(0.0, started + ask.at - time.perf_counter()))
        tasks.append(asyncio.create_task(send(ask)))
    answers = await asyncio.gather(*tasks)
    return answers, max(answer.ended for answer in answers) - started


async def measure(client: AsyncClient, ask: Ask, *, chat: bool, ignore_eos: bool) -> Answer:
    """Send one request, greedy, and read its answer."""
    settings: dict[str, Any] = {"max_tokens": ask.max_tokens, "temperature": 0}
    if ignore_eos:
        settings["ignore_eos"] = True
    message = [{"role": "user", "content": ask.prompt}]
    sent = time.perf_counter()
    parts = (
        client.stream_chat(message, **settings)
        if chat
        else client.stream_completion(ask.prompt, **settings)
    )
    pieces: list[float] = []
    end = End(0, 0, 0)
    try:
        async for part in parts:
            if isinstance(part, End):
                end = part
            elif part.text or part.reasoning:
                pieces.append(time.perf_counter())
    except JaxserveError as error:
        return Answer(sent, time.perf_counter(), tuple(pieces), error=str(error))
    now = time.perf_counter()
    counts = end.prompt_tokens, end.completion_tokens or len(pieces)
    missing = None if pieces else "an answer without text"
    return Answer(sent, now, tuple(pieces), *counts, missing)
