"""The kernels for Hopper, held to the contract of paged attention in Pallas' interpreter.

Few cases and small ones: the interpreter has a thread for each warpgroup and takes its time. On a
jax that the dialect is not offered on, the same cases are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import jax
import numpy as np
import pytest
from attention_cases import Case, Rows, Setting, make_case, operands, oracle

from pallas_kernels.mosaic.support import OFFERED
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.target import Target

MOSAIC = Target("mosaic", interpret=True)

# Every head dim, group, page size, dtype and feature at least once.
SETTINGS = [
    Setting(4, 4, 64, dtype="bfloat16"),
    Setting(6, 2, 64, window=24, dtype="bfloat16"),
    Setting(8, 2, 128, page_size=32, dtype="float16"),
    Setting(8, 1, 80, soft_cap=4.0, dtype="bfloat16"),
    Setting(4, 2, 96, page_size=64, window=33, soft_cap=2.0, dtype="float16"),
    Setting(4, 1, 256, window=500, dtype="bfloat16"),
]
MIXED: Rows = [(1, 33), (17, 17), (1, 1), (3, 258), (1, 600), (20, 77)]

small = partial(make_case, tokens=48, num_rows=6)


# Compiling is what takes the time here, and LLVM's optimiser most of that.
@partial(
    jax.jit,
    static_argnames=("setting", "target"),
    compiler_options={"xla_backend_optimization_level": 0},
)
def run(arrays: dict[str, jax.Array], *, setting: Setting, target: Target) -> jax.Array:
    settings = {"window": setting.window, "soft_cap": setting.soft_cap}
    return paged_attention(**arrays, target=target, scale=setting.scale, **settings)


def settle() -> None:
    """As in `conftest`, in another process."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def attend_there(case: Case, setting: Setting, check_races: bool) -> np.ndarray:
    """f32[num_used, H, D], in a process of `interpreter`."""
    if check_races:
        from jax.experimental.pallas import mosaic_gpu

        mosaic_gpu.set_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams(detect_races=True))
    try:
        out = run(operands(case, setting), setting=setting, target=MOSAIC)
        return np.asarray(out, np.float32)[: case.num_used]
    finally:
        if check_races:
            mosaic_gpu.set_gpu_interpret_mode(None)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process with threads to spare: warpgroups that wait for each other block XLA's, of which
    there are as many as cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPROC", "8")
        with ProcessPoolExecutor(1, get_context("spawn"), settle) as pool:
            yield pool


Attend = Callable[..., np.ndarray | None]


@pytest.fixture
def attend(interpreter: ProcessPoolExecutor) -> Attend:
    """f32[num_used, H, D]; None once it was seen that this jax is told what it would take."""

    def work(case: Case, setting: Setting, *, check_races: bool = False) -> np.ndarray | None:
        done = interpreter.submit(attend_there, case, setting, check_races and OFFERED)
        if OFFERED:
            return done.result()
        with pytest.raises(ValueError, match=r"needs jax 0\.11 or later, this is 0\.10"):
            done.result()
        return None

    return work


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_decodes_and_chunks_equal_a_dense_softmax_in_float64(setting, attend):
    case = small(MIXED, setting)
    if (got := attend(case, setting)) is not None:
        np.testing.assert_allclose(got, oracle(case, setting), atol=4e-2)


def test_a_rows_result_is_the_same_bits_alone_and_in_a_crowd_and_on_other_pages(attend):
    setting = SETTINGS[1]
    together = attend(small(MIXED, setting), setting)
    alone = attend(small(MIXED[4:5], setting, pages_seed=1), setting)
    chunk = attend(small(MIXED[5:6], setting, pages_seed=2), setting)
    if together is not None:
        np.testing.assert_array_equal(together[22:23], alone)
        np.testing.assert_array_equal(together[23:43], chunk)


def test_decodes_that_share_pages_are_the_same_bits_as_each_by_itself(attend):
    """Their first split is one piece of work for all three."""
    setting = Setting(4, 2, 64, dtype="bfloat16")
    case = small([(1, 600), (1, 560), (1, 520)], setting, num_rows=8)
    shared = 512 // setting.page_size
    case.table[1:3, :shared] = case.table[0, :shared]
    together = attend(case, setting)
    for row in range(3):
        alone = replace(case, kv_len=np.where(np.arange(8) == row, case.kv_len, 0).astype(np.int32))
        one = np.clip(np.arange(9) - row, 0, 1).astype(np.int32)
        alone = replace(alone, row_start=one, q=np.roll(case.q, -row, axis=0))
        got = attend(alone, setting)
        if together is not None:
            np.testing.assert_array_equal(together[row], got[0])
    if together is not None:
        np.testing.assert_allclose(together, oracle(case, setting), atol=4e-2)


def test_no_warpgroup_touches_what_another_is_still_at(attend):
    """By the interpreter's vector clocks: every barrier of the ring is where it has to be."""
    case = small([(1, 600), (40, 300), (1, 33)], SETTINGS[0])
    attend(case, SETTINGS[0], check_races=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changed, told",
    [
        ({"head_dim": 72}, "head_dim 72: it does multiples of 16 up to 128, 192 and 256"),
        ({"page_size": 8}, "pages of 8 tokens: it does multiples of 16"),
        ({"num_heads": 66}, "33 query heads per KV head: it does up to 32"),
        ({"int8": True}, "the cache is int8: it does bfloat16 and float16, both alike"),
    ],
    ids=["head dim", "page size", "group", "int8"],
)
def test_what_the_kernels_cannot_do_is_refused_with_what_they_can(changed, told, dtype):
    setting = Setting(**{"num_heads": 4, "dtype": dtype} | changed)
    if not OFFERED:
        told = "needs jax 0.11 or later"
    elif dtype == "float32":
        told = "queries are float32"
    shapes = jax.eval_shape(partial(operands, small(MIXED[:1], setting), setting))
    with pytest.raises(ValueError) as error:
        jax.eval_shape(
            partial(paged_attention, target=MOSAIC, scale=1.0, window=None, soft_cap=None), **shapes
        )
    assert told in str(error.value)
