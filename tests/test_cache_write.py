"""What changes a paged cache, in every version: keys and values land where they should."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_write import copy_pages, write_kv
from pallas_kernels.reference import dequantised
from pallas_kernels.target import Target

TARGETS = [Target("cpu"), Target("native"), Target("triton", interpret=True)]
N, B, K, D = 5, 16, 3, 80
each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.dialect)


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


@each_target
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_values_land_in_their_slots_and_dropped_ones_nowhere(dtype, target):
    pages = (random(N, B, K, D).astype(dtype), -random(N, B, K, D).astype(dtype))
    k, v = random(5, K, D), random(1, 5, K, D)[0]
    slots = [17, N * B, 79, 0, N * B]
    expected = [np.array(x).reshape(N * B, K, D) for x in pages]
    for flat, new in zip(expected, (k, v), strict=True):
        for token in (0, 2, 3):
            flat[slots[token]] = new[token].astype(dtype)
    written = write_kv(pages, k, v, jnp.array(slots, jnp.int32), target=target)
    for got, want in zip(written, expected, strict=True):
        np.testing.assert_array_equal(got.reshape(want.shape), want)


@each_target
def test_an_int8_cache_keeps_each_vector_to_half_a_step_of_its_own_scale(target):
    empty = jnp.full((N, B, K, D), 5, jnp.int8), jnp.full((N, B, K), 2.0)
    pages = (empty[0], empty[0], empty[1], empty[1])
    # A vector of its own size each, and one that is all zeros.
    size = jnp.array([1e-4, 1.0, 0.0, 3e4])[:, None, None]
    k, v = random(4, K, D) * size, random(1, 4, K, D)[0] * size
    slots = jnp.array([3, 44, 16, N * B], jnp.int32)
    k8, v8, k_scale, v_scale = write_kv(pages, k, v, slots, target=target)
    for new, stored, scale in ((k, k8, k_scale), (v, v8, v_scale)):
        got = dequantised(stored, scale, jnp.dtype("float32")).reshape(N * B, K, D)
        step = jnp.max(jnp.abs(new), axis=-1, keepdims=True) / 127
        assert np.all(np.abs(got[slots[:3]] - new[:3]) <= 0.5001 * step[:3])
        untouched = np.delete(np.asarray(got), np.asarray(slots[:3]), axis=0)
        assert np.all(untouched == 10)


@each_target
def test_pages_are_copied_in_order(target):
    pages = random(6, B, K, D)
    # Page 1 is read before it is written; page 4 is not read; 9 is no page.
    source, target_pages = jnp.array([[1, 3, 0], [2, 1, 9]], jnp.int32)
    got = copy_pages(pages, source, target_pages, target=target)
    np.testing.assert_array_equal(got, pages[jnp.array([0, 3, 1, 3, 4, 5])])


@pytest.mark.parametrize("target", TARGETS[2:], ids=["triton"])
def test_the_cache_is_written_in_its_own_buffers(target):
    """As far as a CPU can tell: the results alias the donated operands."""
    pages = (random(N, B, K, D), random(N, B, K, D))
    write = jax.jit(partial(write_kv, target=target), donate_argnums=0)
    lowered = write.lower(pages, random(4, K, D), random(4, K, D), jnp.zeros(4, jnp.int32))
    alias = lowered.compile().memory_analysis().alias_size_in_bytes
    assert alias == 2 * pages[0].nbytes


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"k": jnp.zeros((4, K, 64))}, ["[4, 3, 64]", "[4, 3, 80]"]),
        ({"slots": jnp.zeros(3, jnp.int32)}, ["[4, 3, 80]", "[3, 3, 80]"]),
        ({"pages": (jnp.zeros((N, B, K, D), jnp.int8),) * 2}, ["k_scale", "None", "float32"]),
    ],
    ids=["head dim", "tokens", "no scales"],
)
def test_what_does_not_fit_is_refused_with_both_sides_told(wrong, told):
    right = {
        "pages": (jnp.zeros((N, B, K, D)),) * 2,
        "k": jnp.zeros((4, K, D)),
        "v": jnp.zeros((4, K, D)),
        "slots": jnp.zeros(4, jnp.int32),
    }
    with pytest.raises(ValueError) as error:
        write_kv(**right | wrong, target=Target("cpu"))
    assert all(text in str(error.value) for text in told), error.value
