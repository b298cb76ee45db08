"""The C++ kernels for CPUs: what they are compiled from, what they multiply, and doing without."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import PACKINGS, SETTINGS, make_case, operands, oracle, tolerance

from jaxserve.errors import ConfigError
from jaxserve.models.attention import choose_attention
from jaxserve.models.layers import gated_mlp, linear, take_rows
from pallas_kernels.native import build
from pallas_kernels.native.linear import PANEL, linear_native, pack
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.target import Target


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.fixture(params=["as this CPU can", "without AMX"])
def units(request, monkeypatch):
    """What the products are computed with: once what there is, once what every CPU has."""
    if request.param == "without AMX":
        monkeypatch.setenv("JAXSERVE_AMX", "0")
    build.has_amx.cache_clear()
    yield request.param
    build.has_amx.cache_clear()


def exact(x: jax.Array, weight: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and the sum of its terms' sizes, which bounds its rounding."""
    wide, transposed = np.asarray(x, np.float64), np.asarray(weight, np.float64).T
    return wide @ transposed, np.abs(wide) @ np.abs(transposed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 13, 17, 257])
@pytest.mark.parametrize(("num_out", "num_in"), [(PANEL, 8), (1, 3), (100, 77), (961, 64)])
def test_a_packed_weight_multiplies_like_the_weight_in_float64(
    dtype, tokens, num_out, num_in, units
):
    x, weight = random(tokens, num_in).astype(dtype), random(num_out, num_in, seed=1).astype(dtype)
    got = linear(x, pack(weight), dtype=jnp.dtype(jnp.float32))
    expected, size = exact(x, weight)
    # float32 in matrix units is three products of bfloat16 halves: 16 bits of every factor.
    assert np.all(np.abs(got - expected) <= 2e-5 * size)
    narrow = linear(x, pack(weight))
    assert narrow.dtype == dtype
    np.testing.assert_array_equal(narrow, got.astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tokens_product_is_the_same_bits_whatever_the_other_tokens_are(dtype, units):
    x = random(300, 96).astype(dtype)
    settings = {"norm": (1 + random(96, seed=2), 1e-5), "residual": random(300, 200).astype(dtype)}
    weight = pack(random(200, 96, seed=1).astype(dtype))
    together = np.asarray(linear(x, weight, **settings))
    for start, stop in [(0, 1), (5, 12), (100, 113), (250, 300)]:
        some = settings | {"residual": settings["residual"][start:stop]}
        np.testing.assert_array_equal(linear(x[start:stop], weight, **some), together[start:stop])
    # Not even a neighbour that is no number matters.
    spoilt = linear(x.at[1::2].set(jnp.nan), weight, **settings)
    np.testing.assert_array_equal(spoilt[::2], together[::2])
    assert np.all(np.isnan(np.asarray(spoilt[1::2], np.float32)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_in", [40, 96])
def test_what_happens_on_the_way_is_what_happens_step_by_step(dtype, num_in, units):
    x, weight = random(50, num_in).astype(dtype), random(2 * 90, num_in, seed=1) / num_in**0.5
    weight = weight.astype(dtype)
    norm, residual = (1 + random(num_in, seed=2), 1e-5), random(50, 2 * 90, seed=3).astype(dtype)
    near = {"float32": {"atol": 5e-4}, "bfloat16": {"atol": 0.05, "rtol": 0.02}}[dtype]
    expected = linear(x, weight, norm=norm, residual=residual)
    got = linear(x, pack(weight), norm=norm, residual=residual)
    np.testing.assert_allclose(*(np.float32(y) for y in (got, expected)), **near)
    down = random(num_in, 90, seed=4).astype(dtype) / 16
    for kind in ("silu", "gelu_tanh"):
        expected = gated_mlp(x, weight, down, kind, norm=norm, residual=x)
        got = gated_mlp(x, pack(weight, gated=True), pack(down), kind, norm=norm, residual=x)
        np.testing.assert_allclose(*(np.float32(y) for y in (got, expected)), **near)


def test_a_gate_goes_with_a_weight_packed_for_it():
    for gated, gate in ((True, None), (False, "silu")):
        with pytest.raises(ValueError, match=f"gate {gate} .* gated={gated}"):
            linear_native(random(2, 8), pack(random(4, 8), gated=gated), gate=gate)


def test_an_int8_weight_multiplies_like_what_it_stands_for():
    x, weight = random(13, 77), random(100, 77, seed=1)
    packed = pack(weight, int8=True)
    meant = take_rows(packed, jnp.arange(100))
    step = np.abs(weight).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(np.asarray(meant - weight)) <= 0.5001 * step), "half a step of its row"
    expected = np.asarray(x, np.float64) @ np.asarray(meant, np.float64).T
    np.testing.assert_allclose(linear(x, packed), expected, atol=1e-3)
    # A row of zeros has no largest element to divide by.
    assert not np.asarray(linear(x, pack(jnp.zeros((3, 77)), int8=True))).any()


def test_rows_of_zeros_give_zeros_and_change_nothing_for_the_others():
    x, weight = random(40, 24), pack(random(70, 24, seed=1))
    alone = np.asarray(linear(x, weight))
    dead = np.isin(np.arange(40), [0, 3, 4, 38, 39])
    got = np.asarray(linear(jnp.where(dead[:, None], 0, x), weight))
    np.testing.assert_array_equal(got, np.where(dead[:, None], 0, alone))
    assert not np.asarray(linear(jnp.zeros((5, 24)), weight)).any()
    residual = random(5, 70)
    np.testing.assert_array_equal(linear(jnp.zeros((5, 24)), weight, residual=residual), residual)


@pytest.mark.parametrize("place", [0, 5, 31, 32, 76])
def test_a_row_of_zeros_with_a_nan_in_it_is_none(place):
    x, weight = np.zeros((3, 77), np.float32), pack(random(70, 77))
    x[1, place] = np.nan
    x[2] = -0.0
    got = np.asarray(linear(jnp.asarray(x), weight))
    assert np.isnan(got[1]).all()
    assert not got[[0, 2]].any()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_attention_is_as_right_without_the_matrix_units(setting, units):
    attend = jax.jit(
        partial(
            paged_attention,
            target=Target("native"),
            scale=setting.scale,
            window=setting.window,
            soft_cap=setting.soft_cap,
        )
    )
    for name, rows in PACKINGS.items():
        case = make_case(rows, setting)
        got = np.asarray(attend(**operands(case, setting)), np.float32)[: case.num_used]
        close = tolerance(setting, "native")
        np.testing.assert_allclose(got, oracle(case, setting), atol=close, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rows_of_a_packed_weight_are_the_weights(dtype, units):
    weight = random(70, 24).astype(dtype)
    # Of float32 in two halves of bfloat16, 16 bits are left.
    near = {"rtol": 2**-16 if dtype == "float32" else 0, "atol": 0}
    index = jnp.array([0, 31, 32, 69, 5, 5])
    rows = take_rows(pack(weight), index)
    assert rows.dtype == dtype
    np.testing.assert_allclose(np.float32(rows), np.float32(weight[index]), **near)
    # Padding may name any token: it gets some row, as of a plain weight.
    rows = take_rows(pack(weight), jnp.array([-1, 700]))
    np.testing.assert_allclose(np.float32(rows), np.float32(weight[([0, 69],)]), **near)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    build.has_native.cache_clear()
    yield
    build.has_native.cache_clear()


def test_without_a_compiler_plain_jnp_serves_and_the_log_says_why(no_compiler, caplog):
    caplog.set_level("INFO")
    assert choose_attention("auto").kind == "cpu"
    assert "no-such-compiler is installed" in caplog.text


def test_without_a_compiler_asking_for_them_is_refused(no_compiler):
    with pytest.raises(ConfigError, match="needs a CPU and a C\\+\\+ compiler"):
        choose_attention("native")
    with pytest.raises(RuntimeError, match="C\\+\\+ compiler"):
        linear(random(1, 8), pack(random(8, 8)))


def test_sources_that_do_not_compile_are_told_and_leave_nothing_behind(
    no_compiler, monkeypatch, caplog, tmp_path
):
    source = tmp_path / "wrong.cc"
    source.write_text("#error this is wrong\n")
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho wrong.cc:1: this is wrong >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", (str(compiler),))
    caplog.set_level("INFO")
    assert not build.has_native()
    assert "this is wrong" in caplog.text
    assert not list((tmp_path / "jaxserve" / "native").iterdir())
