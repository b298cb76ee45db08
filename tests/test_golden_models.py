"""The catalogue's two models against texts and log-probabilities of another implementation."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import drain, request
from fixture_files import FIXTURES

from checkpoints import Checkpoint
from jaxserve.batch import DeviceState, StepShape
from jaxserve.engine import Engine
from jaxserve.executor import JaxExecutor, compile_steps, empty_state
from jaxserve.models.attention import PagedAttention
from jaxserve.models.decoder import Decoder
from jaxserve.models.packed import pack_params
from jaxserve.packing import pack
from jaxserve.pages import PagePool
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Sequence as Row
from jaxserve.sequence import Span
from jaxserve.step import make_step

PAGE_SIZE, MAX_PAGES, NUM_PAGES, ROWS, CHUNK = 16, 32, 130, 16, 128


@dataclass(frozen=True)
class Golden:
    """A model in memory and what it should say."""

    decoder: Decoder
    params: Any
    expected: dict[str, Any]

    def new_state(self) -> DeviceState:
        return empty_state(
            self.decoder.config,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            max_rows=ROWS,
            dtype=jnp.dtype(jnp.float32),
        )


def load(checkpoint: Checkpoint, name: str, attention: PagedAttention) -> Golden:
    expected = json.loads((FIXTURES / f"{name}.golden.json").read_text())
    params = checkpoint.load(dtype=jnp.float32)
    if attention.kind == "native":
        params = pack_params(params, tied_head=checkpoint.config.tied_head)
    return Golden(Decoder(checkpoint.config, attention), params, expected)


MODELS = {"smollm2-135m-instruct": "smollm2", "gemma-3-270m": "gemma3_270m"}


@pytest.fixture(
    scope="module",
    params=[(name, kind) for name in MODELS for kind in ("cpu", "native")],
    ids="-".join,
)
def golden(request: pytest.FixtureRequest) -> Golden:
    name, kind = request.param
    return load(request.getfixturevalue(MODELS[name]), name, PagedAttention(kind))


def test_greedy_tokens_equal_the_golden_ones_all_served_together(golden):
    shapes = [StepShape(tokens, ROWS, MAX_PAGES, PAGE_SIZE) for tokens in (ROWS, CHUNK)]
    state = golden.new_state()
    steps = compile_steps(make_step(golden.decoder), golden.params, state, shapes)
    scheduler = Scheduler(
        PagePool(NUM_PAGES, PAGE_SIZE), max_rows=ROWS, token_budget=CHUNK, max_context=512
    )
    engine = Engine(scheduler, JaxExecutor(golden.params, state, steps))
    texts = golden.expected["completions"] + golden.expected["chats"]
    for i, text in enumerate(texts):
        engine.add(request(str(i), text["prompt_ids"], len(text["greedy"])))
    events = drain(engine)
    for i, text in enumerate(texts):
        assert all(step["margin"] > 1e-3 for step in text["greedy"])
        got = [event.token_id for event in events[str(i)]]
        assert got == [step["token"] for step in text["greedy"]]


def test_prompt_logprobs_equal_the_golden_ones_computed_in_chunks(golden):
    (text,) = golden.expected["prompt_logprobs"]
    prompt = text["prompt_ids"]

    @jax.jit
    def logprobs_of_next(params, layers, batch, table, following):
        hidden, layers = golden.decoder.forward(params, layers, batch.token_ids, batch, table)
        logits = golden.decoder.unembed(params, hidden)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), following[:, None], -1), layers

    row = Row(request("prompt", prompt, 1), array("i", prompt), slot=0)
    assert PagePool(NUM_PAGES, PAGE_SIZE).grow(row.pages, len(prompt))
    layers = golden.new_state().layers
    got: list[float] = []
    for start in range(0, len(prompt), CHUNK):
        span = Span(row, start, start + CHUNK, feed=False, draws=False)
        packed = pack([span], StepShape(CHUNK, 1, MAX_PAGES, PAGE_SIZE))
        following = np.array([*prompt[start + 1 : start + CHUNK + 1], 0], np.int32)[:CHUNK]
        chunk, layers = logprobs_of_next(golden.params, layers, *packed, following)
        got += np.asarray(chunk)[:, 0].tolist()
    np.testing.assert_allclose(got[:-1], text["logprobs"][1:], atol=2e-3)
