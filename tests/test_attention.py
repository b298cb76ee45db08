"""The contract of paged attention, and every version of it held to it by the same cases."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    NUM_ROWS,
    PACKINGS,
    SETTINGS,
    TOKENS,
    Case,
    Rows,
    Setting,
    make_case,
    operands,
    oracle,
    tolerance,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.launch_plan import MAX_SPLITS, MIN_SPLIT, plan_launch, split_length
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.target import Target

TARGETS = {
    "reference": Target("reference"),
    "cpu": Target("cpu"),
    "native": Target("native"),
    "triton": Target("triton", interpret=True),
}


# Compiling is what takes the time here, and LLVM's optimiser most of that.
@partial(
    jax.jit,
    static_argnames=("setting", "target"),
    compiler_options={"xla_backend_optimization_level": 0},
)
def run(arrays: dict[str, jax.Array], *, setting: Setting, target: Target) -> jax.Array:
    return paged_attention(
        **arrays,
        target=target,
        scale=setting.scale,
        window=setting.window,
        soft_cap=setting.soft_cap,
    )


def attend(case: Case, setting: Setting, dialect: str) -> np.ndarray:
    """f32[num_used, H, D]."""
    out = run(operands(case, setting), setting=setting, target=TARGETS[dialect])
    return np.asarray(out, np.float32)[: case.num_used]


def assert_right(case: Case, setting: Setting, dialect: str) -> None:
    got = attend(case, setting, dialect)
    np.testing.assert_allclose(got, oracle(case, setting), atol=tolerance(setting, dialect))


each_dialect = pytest.mark.parametrize("dialect", TARGETS)


@each_dialect
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_packing_equals_a_dense_softmax_in_float64(setting, dialect):
    for name, rows in PACKINGS.items():
        case = make_case(rows, setting)
        got = attend(case, setting, dialect)
        expected = oracle(case, setting)
        np.testing.assert_allclose(
            got, expected, atol=tolerance(setting, dialect), err_msg=f"{name}: {rows}"
        )


@each_dialect
@pytest.mark.parametrize("rows", [[(1, 200)], []], ids=["a decode", "padding"])
def test_a_step_of_one_token_equals_it_too(rows, dialect):
    setting = Setting(8, 2, 64)
    assert_right(make_case(rows, setting, tokens=1, num_rows=1), setting, dialect)


@st.composite
def packings(draw: st.DrawFn) -> Rows:
    """Any rows that the padded shape has room for."""
    rows: Rows = []
    tokens, keys = TOKENS, 2000
    for _ in range(draw(st.integers(0, NUM_ROWS))):
        new = draw(st.sampled_from([0, 1, 1, 1, draw(st.integers(2, 40))]))
        new = min(new, tokens)
        kv = new + draw(st.integers(0, 1000)) if new else 0
        kv = min(kv, max(new, keys), 1088)
        rows.append((new, kv))
        tokens, keys = tokens - new, keys - kv
    return rows


@pytest.mark.parametrize("dialect", ["cpu", "native", "triton"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=packings())
def test_drawn_packings_equal_it_too(dialect, rows):
    setting = SETTINGS[1]
    assert_right(make_case(rows, setting), setting, dialect)


CROWD: Rows = [(1, 1023), (7, 300), (1, 30), (1, 700), (21, 21), (0, 0), (1, 512)]


@pytest.mark.parametrize("dialect", ["cpu", "native", "triton"])
@pytest.mark.parametrize("setting", SETTINGS[1:3], ids=str)
def test_a_rows_result_is_the_same_bits_alone_and_in_a_crowd_and_on_other_pages(setting, dialect):
    crowd = make_case(CROWD, setting)
    together = attend(crowd, setting, dialect)
    for row, (tokens, kv) in enumerate(CROWD):
        alone = attend(make_case([(tokens, kv)], setting, pages_seed=row + 1), setting, dialect)
        span = slice(crowd.row_start[row], crowd.row_start[row + 1])
        np.testing.assert_array_equal(together[span], alone, err_msg=f"row {row}")


@pytest.mark.parametrize("setting", SETTINGS[1:4], ids=str)
@pytest.mark.parametrize("cuts", [(60,), (2, 58), (23, 37), (16, 16, 28)], ids=str)
def test_a_prompts_result_is_the_same_bits_in_one_chunk_and_in_several(setting, cuts):
    """Of the GPU kernels: their tiles are aligned in the row. Chunks of one token are decodes."""
    before, whole = 75, make_case([(60, 135)], setting)
    expected = attend(whole, setting, "triton")
    done = 0
    for size in cuts:
        chunk = make_chunk(whole, before + done, size)
        np.testing.assert_array_equal(
            attend(chunk, setting, "triton"), expected[done : done + size], err_msg=f"{done}"
        )
        done += size


def make_chunk(case: Case, start: int, size: int) -> Case:
    """Tokens [start, start + size) of a case's only row, nothing after them in the cache."""
    first = start - (case.kv_len[0] - case.num_used)
    q = np.full_like(case.q, np.nan)
    q[:size] = case.q[first : first + size]
    row_start = np.minimum(case.row_start, size)
    kv_len = np.minimum(case.kv_len, start + size)
    return Case(q, case.k, case.v, case.table, row_start, kv_len, [(size, start + size)])


def test_a_plan_covers_every_query_and_every_key_once():
    rows = [(1, 20_000), (40, 70), (1, 513), (0, 0), (2, 33), (1, 1), (64, 640)]
    row_start = jnp.cumsum(jnp.array([0] + [n for n, _ in rows], jnp.int32), dtype=jnp.int32)
    kv_len = jnp.array([kv for _, kv in rows], jnp.int32)
    table = jnp.arange(len(rows) * 2048, dtype=jnp.int32).reshape(len(rows), 2048)
    sizes = {"num_tokens": 128, "page_size": 16, "query_block": 32, "piece_rows": 4}
    plan = plan_launch(row_start, kv_len, table, **sizes)

    live = np.stack([plan.tile_row, plan.tile_start], 1)[: int(plan.num_tiles[0])].tolist()
    queries = [
        (row, position)
        for row, start in live
        for position in range(max(start, rows[row][1] - rows[row][0]), start + 32)
        if position < rows[row][1]
    ]
    expected = [(r, p) for r, (n, kv) in enumerate(rows) if n > 1 for p in range(kv - n, kv)]
    assert queries == expected

    # Nobody has a page in common with anybody.
    count = int(plan.num_splits[0])
    assert int(plan.num_pieces[0]) == count
    assert (plan.piece_rows[:count, 1:] == -1).all()
    decodes = [(row, kv) for row, (n, kv) in enumerate(rows) if n == 1]
    for owners, splits in (
        (plan.split_row, plan.split_index),
        (plan.piece_rows[:, 0], plan.piece_split),
    ):
        keys = [
            (row, key)
            for row, split in zip(owners[:count].tolist(), splits[:count].tolist(), strict=True)
            for key in range(*(int(plan.row_split_len[row]) * (split + i) for i in (0, 1)))
            if key < rows[row][1]
        ]
        assert sorted(keys) == [(row, key) for row, kv in decodes for key in range(kv)]


def test_splits_are_short_for_short_rows_and_few_for_long_ones():
    kv_len = jnp.arange(1, 300_000, 17, dtype=jnp.int32)
    length = np.asarray(split_length(kv_len))
    assert np.all(-(-np.asarray(kv_len) // length) <= MAX_SPLITS)
    assert np.all(length[np.asarray(kv_len) <= MIN_SPLIT * MAX_SPLITS] == MIN_SPLIT)


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"q": jnp.zeros((8, 3, 64))}, ["float32[8, 3, 64]", "multiple of 2"]),
        ({"q": jnp.zeros((8, 4, 32))}, ["float32[8, 4, 32]", "float32[9, 16, 2, 64]"]),
        (
            {"q": jnp.zeros((8, 4, 64), jnp.bfloat16)},
            ["bfloat16[8, 4, 64]", "float32[9, 16, 2, 64"],
        ),
        ({"v_pages": jnp.zeros((9, 16, 1, 64))}, ["[9, 16, 1, 64]", "[9, 16, 2, 64]"]),
        ({"k_scale": jnp.zeros((9, 16, 2))}, ["k_scale", "int8", "float32[9, 16, 2, 64]"]),
        ({"kv_len": jnp.zeros(3, jnp.int32)}, ["int32[3]", "int32[3]"]),
        ({"page_table": jnp.zeros((2, 4), jnp.int16)}, ["page_table", "int16", "int32"]),
        ({"window": 0}, ["window 0", "at least 1"]),
        ({"soft_cap": -1.0}, ["soft_cap -1.0", "above 0"]),
    ],
    ids=["heads", "head dim", "dtype", "values", "scales", "rows", "ids", "window", "cap"],
)
def test_operands_that_do_not_fit_are_refused_with_both_sides_told(wrong, told):
    right = {
        "q": jnp.zeros((8, 4, 64)),
        "k_pages": jnp.zeros((9, 16, 2, 64)),
        "v_pages": jnp.zeros((9, 16, 2, 64)),
        "page_table": jnp.zeros((2, 4), jnp.int32),
        "row_start": jnp.zeros(3, jnp.int32),
        "kv_len": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(ValueError) as error:
        paged_attention(**right | wrong, target=Target("cpu"), scale=1.0)
    assert all(text in str(error.value) for text in told), error.value


def test_int8_pages_that_32_bit_offsets_do_not_reach_are_refused():
    spec = jax.ShapeDtypeStruct
    pages = spec((131_073, 16, 8, 128), jnp.int8)
    scale = spec(pages.shape[:3], jnp.float32)
    with pytest.raises(ValueError, match=r"131073, 16, 8, 128.*at most 131072 pages"):
        jax.eval_shape(
            partial(paged_attention, target=Target("triton"), scale=1.0),
            spec((1, 8, 128), jnp.bfloat16),
            pages,
            pages,
            spec((1, 4), jnp.int32),
            spec((2,), jnp.int32),
            spec((1,), jnp.int32),
            k_scale=scale,
            v_scale=scale,
        )
