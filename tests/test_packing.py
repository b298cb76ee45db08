"""Spans to arrays: what a step reads back is what the scheduler meant, and padding is inert."""

from __future__ import annotations

from array import array

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.batch import NULL_PAGE, StepShape
from jaxserve.packing import choose_shape, pack, step_shapes
from jaxserve.request import Request, SamplingParams
from jaxserve.sequence import Sequence, Span

PAGE = 4
SHAPE = StepShape(num_tokens=48, num_rows=6, max_pages=12, page_size=PAGE)
find_places = jax.jit(lambda table, batch: table.slots(batch, PAGE, 400))
NOWHERE = np.iinfo(np.int32).max


def make_span(
    start: int, stop: int, *, slot: int = 0, feed: bool = False, draws: bool = True, **sampling
) -> Span:
    """Token number p of the sequence is 1000 * (slot + 1) + p; with `feed` the host lacks the
    last."""
    prompt = tuple(1000 * (slot + 1) + position for position in range(stop - feed))
    request = Request(f"slot {slot}", prompt or (1,), SamplingParams(1, **sampling))
    pages = array("i", range(1 + 50 * slot, 1 + 50 * slot - (-stop // PAGE)))
    return Span(Sequence(request, array("i", prompt), pages, slot=slot), start, stop, feed, draws)


@st.composite
def steps(draw: st.DrawFn) -> list[Span]:
    """Spans of up to six sequences, slots in any order, 48 tokens at most in all."""
    slots = draw(st.permutations(range(6)))[: draw(st.integers(0, 6))]
    spans = []
    for slot in slots:
        start = draw(st.integers(0, 39))
        stop = draw(st.integers(start + 1, min(40, start + 8)))
        feed = stop == start + 1 and draw(st.booleans())
        seed = draw(st.integers(0, 2**64 - 1))
        spans.append(
            make_span(
                start, stop, slot=slot, feed=feed, draws=feed or draw(st.booleans()), seed=seed
            )
        )
    return spans


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps())
def test_every_token_can_be_read_back(spans):
    batch, table = pack(spans, SHAPE)
    used = sum(span.num_tokens for span in spans)
    token = 0
    for row, span in enumerate(spans):
        assert batch.row_start[row] == token
        assert batch.kv_len[row] == span.stop
        assert batch.slot[row] == span.sequence.slot
        assert batch.feed[row] == span.feed
        for position in range(span.start, span.stop):
            assert batch.row_ids[token] == row
            assert batch.positions[token] == position
            if not span.feed:
                assert batch.token_ids[token] == 1000 * (span.sequence.slot + 1) + position
            page = span.sequence.pages[position // PAGE]
            assert table.pages[row, position // PAGE] == page != NULL_PAGE
            token += 1
        held = len(span.sequence.pages)
        assert not np.any(table.pages[row, held:] != NULL_PAGE)
    assert token == used == batch.row_start[-1]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(steps())
def test_padding_belongs_to_nobody(spans):
    batch, table = pack(spans, SHAPE)
    used, rows = sum(span.num_tokens for span in spans), len(spans)
    assert np.all(batch.row_ids[used:] == SHAPE.num_rows)
    assert not batch.token_ids[used:].any() and not batch.positions[used:].any()
    assert np.all(batch.row_start[rows:] == used)
    assert not batch.kv_len[rows:].any() and not batch.feed[rows:].any()
    assert np.all(batch.slot[rows:] == NOWHERE)
    assert np.all(table.pages[rows:] == NULL_PAGE)
    assert not batch.sampling.temperature[rows:].any()
    # In the cache read as [N * B], padding has no place; everything else has one of its own.
    places = np.asarray(find_places(table, batch))
    assert np.all(places[used:] == 400 * PAGE)
    assert len(set(places[:used].tolist())) == used and np.all(places[:used] >= PAGE)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(steps())
def test_shapes_and_dtypes_are_the_same_whatever_is_packed(spans):
    def signature(arrays):
        batch, table = arrays
        leaves = [*vars(batch).values(), *vars(batch.sampling).values(), table.pages]
        return [(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, np.ndarray)]

    expected = signature(pack([], SHAPE))
    assert signature(pack(spans, SHAPE)) == expected
    assert len(expected) == 18
    assert {dtype.name for _, dtype in expected} == {"int32", "uint32", "float32", "bool"}


def test_settings_go_to_the_rows_that_draw_and_only_to_them():
    wanted = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "top_logprobs": 0}
    spans = [
        make_span(0, 5, slot=1, seed=2**63 + 7, **wanted),
        make_span(0, 5, slot=0, draws=False, seed=9, presence_penalty=1.0, **wanted),
        make_span(9, 10, slot=2, feed=True, repetition_penalty=1.2),
    ]
    batch, _ = pack(spans, SHAPE)
    sampling = batch.sampling
    assert sampling.temperature.tolist() == [0.5] + [0.0] * 5
    assert sampling.top_k.tolist() == [3] + [0] * 5
    assert sampling.top_p.tolist() == [0.25] + [1.0] * 5
    assert sampling.min_p.tolist() == [0.125] + [0.0] * 5
    assert sampling.top_logprobs.tolist() == [0] + [-1] * 5
    assert sampling.has_rules.tolist() == [False, False, True] + [False] * 3
    assert sampling.seed.tolist() == [[2**31, 7]] + [[0, 0]] * 5


def test_a_fed_row_takes_its_token_from_its_slot():
    """Row 1's token was drawn by an earlier step; the host knows the others."""
    spans = [make_span(3, 6, slot=2), make_span(7, 8, slot=5, feed=True), make_span(0, 1, slot=1)]
    batch, last_token = jax.device_put((pack(spans, SHAPE)[0], np.arange(70, 78, dtype=np.int32)))
    token_ids = np.asarray(batch.fed_token_ids(last_token))
    assert token_ids[:5].tolist() == [3003, 3004, 3005, 75, 2000]
    assert not token_ids[5:].any()


LADDERS = [(1, 1), (1, 7), (3, 3), (8, 64), (8, 9), (6, 100), (64, 64)]


@pytest.mark.parametrize(("max_rows", "token_budget"), LADDERS)
def test_the_ladder_has_a_shape_for_every_step_within_the_budget(max_rows, token_budget):
    shapes = step_shapes(
        max_rows=max_rows, token_budget=token_budget, max_context=100, page_size=16
    )
    assert list(shapes) == sorted(set(shapes))
    assert len(shapes) <= token_budget.bit_length() + 1
    assert all(shape.max_pages == 7 and shape.page_size == 16 for shape in shapes)
    for tokens in range(1, token_budget + 1):
        for rows in range(1, min(tokens, max_rows) + 1):
            first = make_span(0, tokens - rows + 1)
            others = [make_span(5, 6, slot=i) for i in range(1, rows)]
            shape = choose_shape(shapes, [first, *others])
            # Of 3 tokens and more at most half of a step is padding.
            assert shape.num_tokens <= max(4, 2 * tokens - 1)
            smaller = [s for s in shapes if s < shape]
            assert all(s.num_tokens < tokens or s.num_rows < rows for s in smaller)


@pytest.mark.parametrize(
    ("spans", "what"),
    [
        ([make_span(0, 9)], "9 tokens in 1 rows"),
        ([make_span(i, i + 1, slot=i) for i in range(4)], "4 tokens in 4 rows"),
    ],
    ids=["tokens", "rows"],
)
def test_a_step_larger_than_every_shape_is_refused(spans, what):
    shapes = step_shapes(max_rows=3, token_budget=8, max_context=64, page_size=PAGE)
    with pytest.raises(ValueError, match=rf"{what} does not fit .* 8 tokens in 3 rows"):
        choose_shape(shapes, spans)
