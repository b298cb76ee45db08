"""The C++ kernels for CPUs: what they are compiled from, what they multiply, and doing without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.attention import choose_attention
from jaxserve.models.layers import linear, take_rows
from pallas_kernels.native import build
from pallas_kernels.native.linear import PANEL, pack


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("tokens", [1, 2, 11, 12, 13, 64, 257])
@pytest.mark.parametrize(("num_out", "num_in"), [(PANEL, 8), (1, 3), (100, 77), (961, 64)])
def test_a_packed_weight_multiplies_like_the_weight_in_float64(tokens, num_out, num_in):
    x, weight = random(tokens, num_in), random(num_out, num_in, seed=1)
    got = linear(x, pack(weight))
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(got, expected, atol=1e-5 * num_in)


def test_a_tokens_product_is_the_same_bits_whatever_the_other_tokens_are():
    x, weight = random(300, 96), pack(random(200, 96, seed=1))
    together = np.asarray(linear(x, weight))
    for start, stop in [(0, 1), (5, 12), (100, 113), (250, 300)]:
        np.testing.assert_array_equal(linear(x[start:stop], weight), together[start:stop])


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


def test_the_rows_of_a_packed_weight_are_the_weights():
    weight = random(70, 24)
    index = jnp.array([0, 31, 32, 69, 5, 5])
    np.testing.assert_array_equal(take_rows(pack(weight), index), weight[index])
    # Padding may name any token: it gets some row, as of a plain weight.
    np.testing.assert_array_equal(take_rows(pack(weight), jnp.array([-1, 700])), weight[([0, 69],)])


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
