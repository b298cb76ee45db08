"""The pieces of a model against the published formulas, written out in numpy."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.model_config import Rope
from jaxserve.models.layers import gated_mlp, rms_norm, rope_frequencies, rope_tables
from pallas_kernels.rope import apply_rope

LLAMA3 = Rope(
    theta=500000.0,
    scaling="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_context=8192,
)


def llama3_frequency(frequency: float) -> float:
    """Meta's rule for one frequency, as a case distinction."""
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4:
        return frequency
    if wavelength > 8192 / 1:
        return frequency / 32
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / 32 + smooth * frequency


def test_llama3_scaling_follows_the_published_rule():
    plain = [500000.0 ** (-i / 64) for i in range(0, 64, 2)]
    expected = [llama3_frequency(frequency) for frequency in plain]
    got = rope_frequencies(LLAMA3, 64)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert sum(not math.isclose(a, b) for a, b in zip(plain, expected, strict=True)) == 17


@pytest.mark.parametrize("position", [0, 50, 2000, 8000])
def test_rotation_is_by_position_times_frequency(position):
    x = np.random.default_rng(0).standard_normal((1, 2, 64)).astype(np.float32)
    tables = rope_tables(LLAMA3, 64, jnp.array([position], jnp.int32))
    got = apply_rope(jnp.asarray(x), tables)[0]
    plain = [500000.0 ** (-i / 64) for i in range(0, 64, 2)]
    angle = np.array([position * llama3_frequency(frequency) for frequency in plain])
    turned = (x[0, :, :32] + 1j * x[0, :, 32:]) * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(got, expected, atol=2e-3 if position > 1000 else 1e-5)


def test_linear_scaling_divides_every_frequency():
    linear = rope_frequencies(Rope(scaling="linear", factor=4.0), 16)
    np.testing.assert_allclose(linear * 4, rope_frequencies(Rope(), 16), rtol=1e-6)


def test_rms_norm_is_taken_in_float32_whatever_the_dtype():
    x = jnp.full((1, 256), 300.0, jnp.float16)  # its square overflows float16
    normed = rms_norm(x, jnp.full(256, 2.0), 1e-6)
    assert normed.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(normed, np.float32), 2.0, rtol=1e-3)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_the_gate_is_the_first_half_of_the_fused_weight(kind):
    rng = np.random.default_rng(0)
    x, gate, up = (rng.standard_normal(s).astype(np.float32) for s in ((3, 8), (16, 8), (16, 8)))
    down = rng.standard_normal((8, 16)).astype(np.float32)
    got = gated_mlp(jnp.asarray(x), jnp.concatenate([gate, up]), jnp.asarray(down), kind)
    g = x @ gate.T
    silu = g / (1 + np.exp(-g))
    gelu = 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
    expected = ((silu if kind == "silu" else gelu) * (x @ up.T)) @ down.T
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
