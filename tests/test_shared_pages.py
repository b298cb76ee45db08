"""Decodes that begin with the same pages: read together, and the same bits as read apart."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Rows, Setting, make_case, oracle, tolerance
from test_attention import TARGETS, attend

from pallas_kernels.launch_plan import LaunchPlan, plan_launch, split_length

ROWS: Rows = [(1, 1023), (1, 530), (7, 40), (1, 513), (1, 512)]
SHARED = 512  # keys that rows 1, 3 and 4 keep in the pages of row 0
SETTINGS = [
    Setting(4, 1, 64),
    Setting(8, 1, 80, window=300),
    Setting(8, 2, 128, page_size=32, int8=True),
    Setting(4, 4, 64, window=600, soft_cap=3.0, dtype="bfloat16"),
]
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=str)


def sharing(setting: Setting) -> tuple[Case, Case]:
    """A case whose rows share pages, NaN in those that nobody has for it; and the same numbers with
    pages of each row's own."""
    apart = make_case(ROWS, setting)
    k, v, table = (x.copy() for x in (apart.k, apart.v, apart.table))
    count = SHARED // setting.page_size
    for row in (1, 3, 4):
        for array, together in ((apart.k, k), (apart.v, v)):
            array[apart.table[row, :count]] = array[apart.table[0, :count]]
            together[table[row, :count]] = np.nan
        table[row, :count] = table[0, :count]
    return replace(apart, k=k, v=v, table=table), apart


def pieces_of(plan: LaunchPlan) -> list[tuple[tuple[int, ...], int]]:
    """(rows, split) of each piece."""
    count = int(plan.num_pieces[0])
    rows, splits = np.asarray(plan.piece_rows)[:count], np.asarray(plan.piece_split)[:count]
    return [(tuple(r[r >= 0].tolist()), s) for r, s in zip(rows, splits.tolist(), strict=True)]


def pieces(
    kv_len: list[int], table: np.ndarray, *, size: int = 4, page_size: int = 16, new: object = 1
) -> list[tuple[tuple[int, ...], int]]:
    """Of rows with so many new tokens each."""
    row_start = np.cumsum([0, *np.broadcast_to(np.asarray(new), len(kv_len))])
    plan = plan_launch(
        jnp.asarray(row_start, jnp.int32),
        jnp.asarray(kv_len, jnp.int32),
        jnp.asarray(table, jnp.int32),
        num_tokens=int(row_start[-1]),
        page_size=page_size,
        query_block=32,
        piece_rows=size,
    )
    return pieces_of(plan)


def own_pages(num_rows: int, max_pages: int) -> np.ndarray:
    return np.arange(num_rows * max_pages).reshape(num_rows, max_pages)


@pytest.mark.parametrize("dialect", TARGETS)
@each_setting
def test_rows_that_share_pages_equal_a_dense_softmax_in_float64(setting, dialect):
    together, _ = sharing(setting)
    expected = oracle(together, setting)
    got = attend(together, setting, dialect)
    np.testing.assert_allclose(got, expected, atol=tolerance(setting, dialect))


@each_setting
def test_a_rows_result_is_the_same_bits_read_together_and_read_apart(setting):
    together, apart = (attend(case, setting, "triton") for case in sharing(setting))
    np.testing.assert_array_equal(together, apart)


@pytest.mark.parametrize(
    ("size", "first_split"),
    [(4, [(0, 1, 3, 4)]), (2, [(0, 1), (3, 4)]), (16, [(0, 1, 3, 4)])],
)
def test_a_split_is_one_piece_for_as_many_rows_as_a_program_takes(size, first_split):
    together, apart = sharing(SETTINGS[0])
    new, kv_len = zip(*ROWS, strict=True)
    count = len(ROWS)
    found = pieces(list(kv_len), together.table[:count], size=size, new=new)
    assert found == [*((rows, 0) for rows in first_split), ((0,), 1), ((1,), 1), ((3,), 1)]
    alone = pieces(list(kv_len), apart.table[:count], size=size, new=new)
    assert [rows for rows, split in alone if split == 0] == [(0,), (1,), (3,), (4,)]


def test_prompts_that_fork_are_read_together_as_far_as_they_agree():
    table = own_pages(4, 128)
    table[1:, :32] = table[0, :32]
    table[1, 32:64] = table[0, 32:64]
    table[3, 32:64] = table[2, 32:64]
    assert pieces([1600] * 4, table) == [
        ((0, 1, 2, 3), 0),
        ((0, 1), 1),
        ((2, 3), 1),
        *(((row,), split) for split in (2, 3) for row in range(4)),
    ]
    table = own_pages(3, 128)
    table[1:, :20] = table[0, :20]
    table[2, 20:32] = table[1, 20:32]  # they part from row 0 within the split
    assert pieces([512] * 3, table) == [((0,), 0), ((1, 2), 0)]


@pytest.mark.parametrize(
    ("what", "kv_len", "settings"),
    [
        ("one page in the middle is another", (600, 600), {}),
        ("one row ends within the split", (600, 511), {}),
        ("the longer row has longer splits", (600, 17_000), {}),
        ("one row computes a prompt", (600, 600), {"new": (1, 5)}),
        ("pages end within a split", (600, 600), {"page_size": 24}),
    ],
)
def test_a_split_is_not_shared_where(what, kv_len, settings):
    table = own_pages(2, 2048)
    table[1, :32] = table[0, :32]
    if what.startswith("one page"):
        table[1, 17] = 9999
    assert all(len(rows) == 1 for rows, _ in pieces(list(kv_len), table, **settings))


@pytest.mark.parametrize("seed", range(8))
def test_every_split_of_every_decode_is_in_one_piece_and_pieces_are_as_few_as_can_be(seed):
    rng = random.Random(seed)
    count, size, page_size = rng.randint(1, 12), rng.choice((2, 4, 16)), rng.choice((16, 32, 64))
    most = 2048 // page_size
    chains = own_pages(3, most)
    table = own_pages(count, most) + 10_000
    kv_len, new = [], []
    for row in range(count):
        shared = rng.randrange(most)
        table[row, :shared] = chains[rng.randrange(3), :shared]
        new.append(rng.choice((0, 1, 1, 1, 3)))
        kv_len.append(rng.randint(3, 2048) if new[row] else 0)
    split_len = np.asarray(split_length(jnp.asarray(kv_len, jnp.int32)))

    wanted: Counter[object] = Counter()
    for row in (row for row in range(count) if new[row] == 1):
        for split in range(-(-kv_len[row] // split_len[row])):
            start, stop = split * split_len[row], (split + 1) * split_len[row]
            pages = tuple(table[row, start // page_size : stop // page_size])
            wanted[split, pages if stop <= kv_len[row] else row] += 1
    found = pieces(kv_len, table, size=size, page_size=page_size, new=new)
    for rows, split in found:
        assert len({tuple(table[r, : (split + 1) * 512 // page_size]) for r in rows}) == 1
    covered = Counter((row, split) for rows, split in found for row in rows)
    assert set(covered.values()) <= {1}
    assert len(covered) == sum(wanted.values())
    assert len(found) == sum(-(-rows // size) for rows in wanted.values())
