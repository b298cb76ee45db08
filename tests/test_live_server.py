"""The whole path on the default model: client library, HTTP, worker process, engine, and back."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import random
import signal
import time
import urllib.request
from pathlib import Path

import aiohttp
import openai
import pytest
from fixture_files import FIXTURES
from live import LiveServer, live_server

MODEL = "smollm2-135m-instruct"
GOLDEN = json.loads((FIXTURES / f"{MODEL}.golden.json").read_text())


@pytest.fixture(scope="module")
def client(live: LiveServer):
    with openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    from jaxserve.tokenizer import Tokenizer

    return Tokenizer(smollm2.tokenizer, vocab_size=smollm2.config.vocab_size)


def golden_text(tokenizer, entry, count: int) -> str:
    ids = [step["token"] for step in entry["greedy"][:count]]
    end = next((i for i, token in enumerate(ids) if token == 2), count)
    return tokenizer.decode(ids[:end])


@pytest.mark.parametrize("entry", GOLDEN["completions"], ids=lambda e: e["prompt"][:20])
def test_completions_are_the_golden_texts(client, tokenizer, entry):
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 16}
    expected = golden_text(tokenizer, entry, 16)
    whole = client.completions.create(prompt=entry["prompt"], **asked)
    assert whole.choices[0].text == expected
    assert whole.usage.prompt_tokens == len(entry["prompt_ids"])
    stream = client.completions.create(prompt=entry["prompt_ids"], stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_a_text_is_scored_as_the_same_tokens_generated_are(client):
    """What an evaluation harness asks: no token generated, log-probabilities of a given text."""
    asked = {"model": MODEL, "temperature": 0, "logprobs": 1}
    written = client.completions.create(prompt="The sky is", max_tokens=8, **asked).choices[0]
    text = "The sky is" + written.text
    reply = client.completions.create(prompt=text, max_tokens=0, echo=True, **asked)
    (choice,), scores = reply.choices, reply.choices[0].logprobs
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert "".join(scores.tokens) == text and reply.usage.completion_tokens == 0
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    assert scores.tokens[-8:] == written.logprobs.tokens
    assert scores.token_logprobs[-8:] == pytest.approx(written.logprobs.token_logprobs, abs=1e-3)
    assert scores.text_offset[-1] == len(text) - len(scores.tokens[-1])


def test_a_request_can_be_looked_at_and_ended(live, client):
    stream = client.completions.create(
        model=MODEL,
        prompt="One, two,",
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    first = next(stream)
    (seen,) = json.loads(live.get("/requests"))["requests"]
    assert (seen["id"], seen["state"]) == (first.id, "decode")
    assert seen["pages"] >= 1 and seen["computed_tokens"] >= seen["prompt_tokens"]
    ended = urllib.request.Request(f"{live.url}/requests/{first.id}/abort", method="POST")
    with urllib.request.urlopen(ended, timeout=30) as reply:
        assert json.loads(reply.read()) == {"id": first.id, "aborted": 1}
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
    live.wait_for_metric("jaxserve_pages_live", 0)


def test_biases_bans_and_penalties_reach_the_model(client, tokenizer):
    def complete(max_tokens: int = 6, **fields):
        fields = {"logit_bias": None} | fields
        reply = client.completions.create(
            model=MODEL, prompt="Order:", max_tokens=max_tokens, temperature=0, logprobs=0, **fields
        )
        return reply.choices[0]

    assert complete(1, logit_bias={"7188": 100}).text == " tea"
    plain = complete()
    word = plain.logprobs.tokens[2].strip()
    assert word and word not in complete(extra_body={"bad_words": [word]}).text
    only = [*range(20, 30), 7188]
    chosen = complete(extra_body={"allowed_token_ids": only}).logprobs.tokens
    assert set(chosen) <= {tokenizer.decode([token]) for token in only}
    looped = complete(12, logit_bias={"7188": 100})
    assert looped.text == " tea" * 12
    varied = complete(60, logit_bias={"7188": 20}, frequency_penalty=2).logprobs.tokens
    assert 1 < varied.count(" tea") < 60
    ended = complete(20, logit_bias={"2": 100})
    assert (ended.text, ended.finish_reason) == ("", "stop")
    later = complete(20, logit_bias={"2": 100}, extra_body={"min_tokens": 5})
    assert len(later.logprobs.tokens) == 6 and later.finish_reason == "stop"


@pytest.mark.parametrize("entry", GOLDEN["chats"], ids=["one turn", "short", "long"])
def test_chats_are_the_golden_texts(client, tokenizer, entry):
    asked = {"model": MODEL, "messages": entry["messages"], "temperature": 0, "max_tokens": 24}
    expected = golden_text(tokenizer, entry, 24)
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected
    assert whole.usage.prompt_tokens == len(entry["prompt_ids"])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked, **options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected
    usage = chunks[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    # The same prompt again: all but its last token is found, the last page by copying it.
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_a_chat_about_france_names_paris(client):
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
    )
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"


def test_a_seed_repeats_and_choices_differ(client):
    asked = {"model": MODEL, "prompt": "Name a colour:", "temperature": 1.0, "max_tokens": 12}
    first = client.completions.create(seed=11, n=4, **asked)
    again = client.completions.create(seed=11, n=4, **asked)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 4
    unseeded = {client.completions.create(**asked).choices[0].text for _ in range(3)}
    assert len(unseeded) == 3


def test_logprobs_agree_with_the_golden_ones(client):
    entry = GOLDEN["completions"][0]
    reply = client.completions.create(
        model=MODEL, prompt=entry["prompt"], temperature=0, max_tokens=8, logprobs=5
    )
    got = reply.choices[0].logprobs
    for step, logprob, top in zip(
        entry["greedy"], got.token_logprobs, got.top_logprobs, strict=False
    ):
        assert logprob == pytest.approx(step["top"][0][1], abs=2e-3)
        expected = [value for _, value in step["top"]]
        assert sorted(top.values(), reverse=True)[:5] == pytest.approx(expected, abs=2e-3)


def test_refusals_are_the_client_librarys_own_errors(client):
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="1024"):
        client.completions.create(model=MODEL, prompt=[5] * 1024, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="49152"):
        client.completions.create(model=MODEL, prompt=[5, 49152], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        client.completions.create(model=MODEL, prompt="x", presence_penalty=2.5)


def test_after_ready_nothing_compiles_whatever_is_asked(client, live):
    for prompt_tokens in (1, 2, 3, 7, 15, 31, 33, 70, 300):
        client.completions.create(model=MODEL, prompt=[9] * prompt_tokens, max_tokens=2)
    features = [
        {},
        {"temperature": 0.7, "top_p": 0.9, "seed": 1},
        {"temperature": 1.0, "extra_body": {"top_k": 3, "min_p": 0.1}},
        {"logprobs": 5},
        {"n": 5, "temperature": 1.5},
        {"stop": [" the", "\n"]},
        {"echo": True, "logprobs": 2},
        {"extra_body": {"ignore_eos": True, "stop_token_ids": [30]}},
    ]
    for feature in features:
        client.completions.create(model=MODEL, prompt="Once upon", max_tokens=4, **feature)
    assert live.metric("jaxserve_steps_total") > 50
    assert live.metric("jaxserve_compilations_total") == 0


def test_64_streams_some_cut_short_leave_nothing_behind(live):
    chance = random.Random(5)
    cuts = {i: chance.randint(0, 4) for i in chance.sample(range(64), 7)}

    async def stream(session: aiohttp.ClientSession, number: int) -> int:
        body = {
            "model": MODEL,
            "prompt": [100 + number] * (1 + number % 40),
            "max_tokens": 8,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        chunks, tokens = 0, 0
        async with session.post(f"{live.url}/v1/completions", json=body) as reply:
            assert reply.status == 200
            async for line in reply.content:
                if number in cuts and chunks >= cuts[number]:
                    return -1  # leaving the block closes the connection
                if line.startswith(b"data: {"):
                    chunks += 1
                    usage = json.loads(line[6:])["usage"]
                    tokens = usage["completion_tokens"] if usage else tokens
        return tokens

    async def crowd() -> list[int]:
        timeout = aiohttp.ClientTimeout(total=120)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            return await asyncio.gather(*(stream(session, i) for i in range(64)))

    assert asyncio.run(crowd()) == [-1 if i in cuts else 8 for i in range(64)]
    live.wait_for_metric("jaxserve_pages_live", 0)
    live.wait_for_metric("jaxserve_running", 0)
    live.wait_for_metric("jaxserve_waiting", 0)


def test_a_dead_engine_fails_open_streams_and_comes_back(smollm2):
    with live_server() as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked = {"model": MODEL, "prompt": "Once", "max_tokens": 900}
            stream = client.completions.create(
                stream=True, extra_body={"ignore_eos": True}, **asked
            )
            next(iter(stream))
            os.kill(worker_of(server.process.pid), signal.SIGKILL)
            with pytest.raises(openai.APIError):
                for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError):  # 503
                client.completions.create(model=MODEL, prompt="x", max_tokens=1)
            wait_until_healthy(server)
            reply = client.completions.create(model=MODEL, prompt="x", max_tokens=1)
            assert reply.usage.completion_tokens == 1
        assert server.stop() == 0


def worker_of(server: int) -> int:
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return next(int(child) for child in children if b"jaxserve.worker" in read_command(int(child)))


def read_command(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def wait_until_healthy(server: LiveServer, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            server.get("/health")
            return
        except OSError:
            assert time.monotonic() < deadline, "the server did not get well again"
            time.sleep(0.2)


def test_embeddings_are_the_same_alone_and_among_others_and_tell_texts_apart(live, client):
    texts = ["The cat sat on the mat.", "A cat was sitting on a rug.", "Interest rates rose."]
    for pooling in ("last", "mean"):
        asked = {"model": MODEL, "extra_body": {"pooling": pooling}}
        reply = client.embeddings.create(input=[*texts, *texts], **asked)
        vectors = [item.embedding for item in reply.data]
        assert {len(vector) for vector in vectors} == {576}
        for text, vector in zip(texts, vectors, strict=False):
            alone = client.embeddings.create(input=text, **asked).data[0].embedding
            assert alone == pytest.approx(vector, abs=1e-4)
        cat, rug, rates = vectors[:3]
        near, far = (sum(map(operator.mul, cat, other)) for other in (rug, rates))
        assert near > far
    assert live.metric("jaxserve_compilations_total") == 0
