"""Drawing tokens, against sorting in numpy: which may come, how often, and from whose key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batch import MAX_TOP_LOGPROBS, NOT_FINITE, NOTHING_LEFT
from jaxserve.packing import sampling_arrays
from jaxserve.request import SamplingParams
from jaxserve.sampling import _filter, sample, token_logprobs

VOCAB = 300  # more than two buckets of the draw, and not a whole number of them
ROWS = 64

run_sample = jax.jit(sample)
run_logprobs = jax.jit(token_logprobs)


def settings(rows: int = ROWS, **fields):
    """The same settings on every row, but for fields given as a list: those have one a row."""
    per_row = [
        {name: value[i] if isinstance(value, list) else value for name, value in fields.items()}
        for i in range(rows)
    ]
    return sampling_arrays([SamplingParams(1, **each) for each in per_row], rows)


def random_logits(rows: int = ROWS, vocab: int = VOCAB, *, ties: bool = False, seed: int = 0):
    logits = 3 * np.random.default_rng(seed).standard_normal((rows, vocab), np.float32)
    return np.round(logits) if ties else logits


def draw(logits, positions=None, **fields) -> np.ndarray:
    rows = len(logits)
    positions = np.zeros(rows, np.int32) if positions is None else np.asarray(positions, np.int32)
    return np.asarray(run_sample(logits, positions, settings(rows, **fields)))


def draw_many(logits, num: int, **fields) -> np.ndarray:
    """i32[num] draws from one row of logits: the positions are what differs."""
    rows = np.broadcast_to(logits, (ROWS, len(logits)))
    positions = np.arange(num).reshape(-1, ROWS)
    return np.concatenate([draw(rows, each, **fields) for each in positions])


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """f64[V]: what one row's draw should follow, by sorting. Ties at an edge are kept."""
    logits = logits.astype(np.float64) / temperature
    weights = np.exp(logits - logits.max())
    weights[weights < min_p] = 0
    if top_k:
        kth = np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
        weights[logits < kth] = 0
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        reached = np.cumsum(weights[order]) >= top_p * weights.sum()
        weights[weights < weights[order][np.argmax(reached)]] = 0
    return weights / weights.sum()


@pytest.mark.parametrize("ties", [False, True])
def test_greedy_takes_the_first_of_the_likeliest(ties):
    logits = random_logits(ties=ties)
    np.testing.assert_array_equal(draw(logits), np.argmax(logits, axis=-1))


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB + 5},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 2.0, "top_k": 100, "top_p": 0.9, "min_p": 0.001},
]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_a_filter_keeps_exactly_the_tokens_that_sorting_would(fields, ties):
    logits = random_logits(ties=ties)
    fields = {"temperature": 1.0, **fields}
    distance = (logits.max(-1, keepdims=True) - logits) / np.float32(fields["temperature"])
    got = np.asarray(jax.jit(_filter)(distance, settings(**fields))) > 0
    expected = np.stack([probabilities(row, **fields) > 0 for row in logits])
    np.testing.assert_array_equal(got, expected)


def test_every_row_has_filters_of_its_own():
    logits = random_logits()
    mixed = [FILTERS[i % len(FILTERS)] if i % 3 else {} for i in range(ROWS)]
    arrays = sampling_arrays([SamplingParams(1, **{"temperature": 1.0, **f}) for f in mixed], ROWS)
    temperature = arrays.temperature[:, None]
    distance = (logits.max(-1, keepdims=True) - logits) / temperature
    got = np.asarray(jax.jit(_filter)(distance, arrays)) > 0
    expected = np.stack([probabilities(r, **f) > 0 for r, f in zip(logits, mixed, strict=True)])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("fields", [{}, *FILTERS[4:]], ids=str)
def test_draws_follow_the_filtered_distribution(fields):
    logits = random_logits(1, seed=3)[0]
    num = 64 * 64
    drawn = draw_many(logits, num, **{"temperature": 1.0, "seed": 5, **fields})
    expected = probabilities(logits, **fields) * num
    counts = np.bincount(drawn, minlength=VOCAB)
    assert not counts[expected == 0].any(), "a token came that was filtered out"
    # Rare tokens together in one bin; then chi-square, whose mean is its degrees of freedom.
    often = expected >= 8
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    freedom = np.count_nonzero(expected) - 1
    chi_square = np.sum((counts - expected) ** 2 / np.maximum(expected, 1e-9))
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [10.0**power for power in range(-5, 6)])
def test_no_temperature_makes_anything_but_tokens(temperature):
    logits = random_logits()
    logits[0, 7] = 1e30
    logits[1, 3:] = -np.inf
    logits[2] = -1e30
    logits[3] *= 1e4
    tokens = draw(logits, temperature=temperature, seed=list(range(ROWS)), top_p=0.999)
    assert np.all((tokens >= 0) & (tokens < VOCAB))
    assert tokens[0] == 7 and tokens[1] < 3
    if temperature <= 1e-4:
        np.testing.assert_array_equal(np.delete(tokens, 2), np.delete(logits.argmax(-1), 2))
    if temperature >= 1e4:
        assert len(set(tokens.tolist())) > ROWS // 2, "nearly uniform over the vocabulary"


def test_an_impossible_token_is_never_drawn():
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[5, 140, 299]] = [0.0, -3.0, 0.5]
    for fields in ({}, {"top_k": 200}, {"top_p": 0.999}):
        drawn = draw_many(logits, 640, temperature=1e5, seed=1, **fields)
        assert set(drawn.tolist()) == {5, 140, 299}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_that_cannot_be_drawn_from_says_why_and_harms_no_other(temperature):
    logits = random_logits()
    fields = {"temperature": temperature, "seed": list(range(ROWS)), "top_p": 0.9, "top_k": 50}
    expected = draw(logits, **fields)
    bad = logits.copy()
    bad[3, 17] = bad[20] = np.nan
    bad[40, 5] = np.inf
    bad[63] = -np.inf
    tokens = draw(bad, **fields)
    rows = [3, 20, 40, 63]
    assert tokens[rows].tolist() == [NOT_FINITE] * 3 + [NOTHING_LEFT]
    np.testing.assert_array_equal(np.delete(tokens, rows), np.delete(expected, rows))


# Whose draw it is.

HOT = {"temperature": 1.0, "top_p": 0.95}


@pytest.mark.parametrize("rows", [1, 4, ROWS])
def test_a_draw_depends_on_its_own_seed_and_position_only(rows):
    """One row among others of every kind, at every place of batches of three sizes."""
    own = random_logits(1, seed=9)[0]
    expected = draw(own[None], [33], seed=7, **HOT)[0]
    for place in {0, rows // 2, rows - 1}:
        logits = random_logits(rows, seed=place + 1)
        logits[place] = own
        positions = np.arange(rows)
        positions[place] = 33
        fields = {
            "temperature": [0.0 if i % 3 == 1 else 0.7 for i in range(rows)],
            "top_p": [1.0 if i % 2 else 0.5 for i in range(rows)],
            "top_k": [5 if i % 5 == 3 else 0 for i in range(rows)],
            "seed": list(range(1000, 1000 + rows)),
        }
        for name, value in {**HOT, "top_k": 0, "seed": 7}.items():
            fields[name][place] = value
        assert draw(logits, positions, **fields)[place] == expected


def test_the_order_of_rows_does_not_matter():
    logits, seeds = random_logits(), list(range(ROWS))
    order = np.random.default_rng(1).permutation(ROWS)
    straight = draw(logits, np.arange(ROWS), seed=seeds, **HOT)
    turned = draw(logits[order], np.arange(ROWS)[order], seed=order.tolist(), **HOT)
    np.testing.assert_array_equal(turned, straight[order])


def test_every_seed_has_a_stream_of_its_own():
    """Neither half of the 64 bits is dropped, and no seed wraps into another."""
    flat = np.zeros(VOCAB, np.float32)
    seeds = [0, 1, 2, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1]
    streams = {tuple(draw_many(flat, ROWS, temperature=1.0, seed=seed)) for seed in seeds}
    assert len(streams) == len(seeds)
    for stream in streams:
        assert len(set(stream)) > ROWS // 2, "the position must move the draw"


def test_different_seeds_draw_differently_and_equal_seeds_alike():
    logits = np.broadcast_to(np.zeros(VOCAB, np.float32), (ROWS, VOCAB))
    assert len(set(draw(logits, seed=list(range(ROWS)), **HOT).tolist())) > ROWS // 2
    assert len(set(draw(logits, seed=7, **HOT).tolist())) == 1


# Log-probabilities.


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("vocab", [8, 20, VOCAB])
def test_logprobs_are_those_of_the_untempered_model(vocab):
    logits = random_logits(vocab=vocab)
    tokens = np.arange(ROWS, dtype=np.int32) % vocab
    arrays = settings(temperature=0.3, top_k=2, top_logprobs=20)
    chosen, ids, top = map(np.asarray, run_logprobs(logits, tokens, arrays))
    expected = log_softmax(logits)
    count = min(vocab, MAX_TOP_LOGPROBS)
    assert ids.shape == top.shape == (ROWS, MAX_TOP_LOGPROBS)
    np.testing.assert_allclose(chosen, expected[np.arange(ROWS), tokens], atol=1e-4)
    order = np.argsort(-expected, axis=-1)[:, :count]
    np.testing.assert_array_equal(ids[:, :count], order)
    np.testing.assert_allclose(top[:, :count], np.take_along_axis(expected, order, -1), atol=1e-4)
    assert not ids[:, count:].any() and not top[:, count:].any()


def test_one_row_that_asks_gets_its_logprobs_among_rows_that_do_not():
    logits = random_logits(4)
    tokens = np.array([1, 2, 3, 4], np.int32)
    arrays = settings(4, top_logprobs=[None, 0, None, None])
    chosen, _, _ = run_logprobs(logits, tokens, arrays)
    np.testing.assert_allclose(chosen[1], log_softmax(logits)[1, 2], atol=1e-4)


def test_a_step_in_which_nobody_asks_has_zeros():
    results = run_logprobs(random_logits(4), jnp.arange(4), settings(4))
    assert all(not np.asarray(x).any() for x in results)
