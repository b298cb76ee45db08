"""The CPU's paged attention against the specification, and the specification against itself."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import paged_attention_cpu, plan_attention
from pallas_kernels.reference import paged_attention_reference, write_kv_reference

PAGE = 16

# (tokens in the step, tokens in the cache after it) per row.
PACKINGS = {
    "decodes": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 513), (1, 64), (1, 65)],
    "one long decode": [(1, 1023)],
    "whole prompts": [(16, 16), (17, 17), (130, 130)],
    "chunks": [(5, 90), (64, 513), (65, 200)],
    "mixed": [(1, 33), (40, 40), (1, 1), (3, 258), (1, 130), (70, 70)],
    "empty rows between": [(0, 0), (1, 7), (0, 0), (9, 20), (0, 0)],
    "more rows than a block": [(1, 5 + 7 * i) for i in range(19)],
}
HEADS = [(4, 4, 8), (8, 2, 16), (9, 3, 64), (8, 1, 80)]  # H, K, D
# One padded shape for every packing: each setting compiles once.
TOKENS, ROWS, MAX_PAGES, NUM_PAGES = 180, 20, 70, 180


def case(rows, heads, *, seed=0, poison=False):
    """Random operands for the rows, pages in random order; unowned places NaN if poisoned."""
    num_heads, num_kv_heads, head_dim = heads
    rng = np.random.default_rng(seed)
    rows = rows + [(0, 0)] * (ROWS - len(rows))
    need = [-(-kv // PAGE) for _, kv in rows]
    order = rng.permutation(np.arange(1, NUM_PAGES))
    table = np.zeros((ROWS, MAX_PAGES), np.int32)
    shape = (NUM_PAGES, PAGE, num_kv_heads, head_dim)
    k, v = rng.standard_normal((2, *shape), dtype=np.float32)
    owned = np.zeros(shape[:2], bool)
    for row, (_, kv) in enumerate(rows):
        pages, order = order[: need[row]], order[need[row] :]
        table[row, : need[row]] = pages
        flat = np.zeros(need[row] * PAGE, bool)
        flat[:kv] = True
        owned[pages] = flat.reshape(-1, PAGE)
    q = rng.standard_normal((TOKENS, num_heads, head_dim), dtype=np.float32)
    row_start = np.cumsum([0] + [n for n, _ in rows]).astype(np.int32)
    if poison:
        k[~owned] = v[~owned] = np.nan
        q[row_start[-1] :] = np.nan
    kv_len = np.array([kv for _, kv in rows], np.int32)
    return tuple(jnp.asarray(x) for x in (q, k, v, table, row_start, kv_len))


@partial(jax.jit, static_argnames=("scale", "window"))
def run_cpu(operands, *, scale, window=None):
    q, k, v, table, row_start, kv_len = operands
    plan = plan_attention(row_start, kv_len, q.shape[0])
    return paged_attention_cpu(q, k, v, table, row_start, kv_len, plan, scale=scale, window=window)


@partial(jax.jit, static_argnames=("scale", "window"))
def run_reference(operands, *, scale, window=None):
    return paged_attention_reference(*operands, scale=scale, window=window)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("rows", PACKINGS.values(), ids=PACKINGS)
def test_the_cpu_path_equals_the_reference(rows, window, heads):
    used = sum(n for n, _ in rows)
    operands = case(rows, heads)
    expected = run_reference(operands, scale=0.3, window=window)
    got = run_cpu(operands, scale=0.3, window=window)
    np.testing.assert_allclose(got[:used], expected[:used], atol=2e-5)


@pytest.mark.parametrize("attend", [run_cpu, run_reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("rows", PACKINGS.values(), ids=PACKINGS)
def test_what_lies_in_places_nobody_owns_has_no_influence(rows, window, attend):
    used = sum(n for n, _ in rows)
    clean = case(rows, (8, 2, 16))
    poisoned = case(rows, (8, 2, 16), poison=True)
    expected = attend(clean, scale=0.25, window=window)
    got = attend(poisoned, scale=0.25, window=window)
    np.testing.assert_array_equal(got[:used], expected[:used])


def test_the_reference_equals_a_dense_softmax_written_out():
    q, k, v, table, row_start, kv_len = case([(3, 5)], (4, 2, 8))
    got = paged_attention_reference(q, k, v, table, row_start, kv_len, scale=0.5)
    keys = np.asarray(k)[np.asarray(table)[0, 0], :5]
    values = np.asarray(v)[np.asarray(table)[0, 0], :5]
    for token in range(3):
        for head in range(4):
            seen = 3 + token
            scores = keys[:seen, head // 2] @ np.asarray(q)[token, head] * 0.5
            weights = np.exp(scores - scores.max())
            expected = weights @ values[:seen, head // 2] / weights.sum()
            np.testing.assert_allclose(got[token, head], expected, rtol=1e-5, atol=1e-6)


def test_a_rows_result_is_the_same_bits_whatever_its_neighbours_and_pages():
    alone = [(1, 200)]
    crowd = [(1, 200), *[(1, 30 + 100 * i) for i in range(7)]]
    lonely = case(alone, (9, 3, 64))
    crowded = list(case(crowd, (9, 3, 64), seed=1))
    # Give the crowd's first row the lonely row's query, keys and values, on pages of its own.
    crowded[0] = crowded[0].at[0].set(lonely[0][0])
    for pages in (1, 2):
        own = lonely[pages][lonely[3][0, :13]]
        crowded[pages] = crowded[pages].at[crowded[3][0, :13]].set(own)
    first = run_cpu(lonely, scale=0.125)[0]
    np.testing.assert_array_equal(run_cpu(tuple(crowded), scale=0.125)[0], first)


def test_written_keys_land_in_their_slots_and_padding_lands_nowhere():
    k_pages = jnp.zeros((3, PAGE, 2, 4))
    v_pages = jnp.zeros((3, PAGE, 2, 4))
    new = jnp.arange(4 * 2 * 4, dtype=jnp.float32).reshape(4, 2, 4) + 1
    slots = jnp.array([17, 3 * PAGE, 47, 2 * PAGE], jnp.int32)
    k, v = write_kv_reference(k_pages, v_pages, new, -new, slots)
    np.testing.assert_array_equal(k[1, 1], new[0])
    np.testing.assert_array_equal(v[2, 15], -new[2])
    np.testing.assert_array_equal(k[2, 0], new[3])
    assert int(jnp.count_nonzero(k)) == 3 * 8  # the dropped token is nowhere
    assert jax.tree.map(jnp.shape, (k, v)) == ((3, PAGE, 2, 4),) * 2
