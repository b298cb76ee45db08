"""Rows in blocks: what comes out is what comes out of all of them at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.packing import sampling_arrays
from jaxserve.request import SamplingParams
from jaxserve.row_blocks import ROWS, in_row_blocks
from jaxserve.sampling import sample, token_logprobs

COUNTS = (1, ROWS, ROWS + 1, 2 * ROWS - 1, 2 * ROWS, 2 * ROWS + 36)


@pytest.mark.parametrize("count", COUNTS)
def test_every_row_comes_back_once_and_in_its_place(count):
    rows = {"x": np.arange(count), "y": np.arange(3.0 * count).reshape(count, 3)}

    def work(some):
        return some["x"] * 2, {"sum": jnp.sum(some["y"], axis=-1), "same": some["y"]}

    doubled, rest = jax.jit(lambda rows: in_row_blocks(work, rows))(rows)
    np.testing.assert_array_equal(doubled, 2 * rows["x"])
    np.testing.assert_array_equal(rest["sum"], rows["y"].sum(axis=-1))
    np.testing.assert_array_equal(rest["same"], rows["y"])


@pytest.mark.parametrize("count", COUNTS)
def test_no_work_is_done_on_more_rows_than_a_block_has(count):
    seen = []

    def work(x):
        seen.append(x.shape[0])
        return x

    in_row_blocks(work, jnp.arange(count))
    assert max(seen) == min(count, ROWS)


def test_a_block_decides_by_its_own_rows():
    asks = np.arange(2 * ROWS + 5) >= 2 * ROWS  # none but the last five, whose block overlaps

    def work(asks):
        any_asks = jax.lax.cond(jnp.any(asks), lambda: True, lambda: False)
        return jnp.broadcast_to(any_asks, asks.shape)

    np.testing.assert_array_equal(jax.jit(lambda x: in_row_blocks(work, x))(asks), asks)


def test_tokens_drawn_in_blocks_are_those_drawn_at_once():
    count = 2 * ROWS + 22
    chance = np.random.default_rng(0)
    logits = 3 * chance.standard_normal((count, 300), np.float32)
    logits[17] = np.nan
    params = [
        SamplingParams(
            1,
            temperature=[0.0, 0.7, 1.5][i % 3],
            top_k=[0, 5][i % 2],
            top_p=[1.0, 0.8, 0.5, 0.1][i % 4],
            top_logprobs=3 if i > ROWS else None,
            seed=i,
        )
        for i in range(count)
    ]
    rows = (logits, np.arange(count, dtype=np.int32), sampling_arrays(params, count))

    def work(some):
        logits, positions, sampling = some
        token_ids = sample(logits, positions, sampling)
        return token_ids, *token_logprobs(logits, token_ids, sampling)

    at_once = jax.jit(work)(rows)
    in_blocks = jax.jit(lambda rows: in_row_blocks(work, rows))(rows)
    np.testing.assert_array_equal(in_blocks[0], at_once[0])
    asked = np.arange(count) > ROWS
    for one, other in zip(in_blocks[1:], at_once[1:], strict=True):
        np.testing.assert_allclose(one[asked], other[asked], atol=1e-6)
