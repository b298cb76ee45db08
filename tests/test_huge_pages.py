"""Large arrays on large pages: where they lie changes, what they hold does not."""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import huge_pages
from jaxserve.huge_pages import SIZE, settle_on_huge_pages


class Library:
    """A C library that notes what it is asked, and says no to the `refuse`-th question."""

    def __init__(self, refuse: int = 0) -> None:
        self.calls: list[tuple[int, int, int]] = []

        def madvise(start: int, length: int, what: int) -> int:
            self.calls.append((start, length, what))
            return -1 if len(self.calls) == refuse else 0

        self.madvise = madvise


@pytest.fixture
def use(monkeypatch):
    monkeypatch.setattr(huge_pages.sys, "platform", "linux")

    def use(library: Library) -> Library:
        monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: library)
        return library

    return use


def test_only_whole_pages_inside_an_array_are_asked_for(use):
    library = use(Library())
    arrays = [jnp.arange(5 * SIZE // 4, dtype=jnp.float32), jnp.ones(3), jnp.zeros(0)]
    asked = settle_on_huge_pages(arrays)
    first = arrays[0].unsafe_buffer_pointer()
    assert [what for *_, what in library.calls] == [huge_pages.HUGEPAGE, huge_pages.COLLAPSE]
    for start, length, _ in library.calls:
        assert start % SIZE == length % SIZE == 0
        assert first <= start and start + length <= first + arrays[0].nbytes
        assert length == asked >= 4 * SIZE


@pytest.mark.parametrize("refuse", [1, 2])
def test_a_system_that_has_none_is_asked_once(use, refuse):
    library = use(Library(refuse))
    assert settle_on_huge_pages([jnp.zeros(SIZE), jnp.ones(SIZE)]) == 0
    assert len(library.calls) == refuse


def test_what_arrays_hold_and_where_stays():
    array = jax.random.normal(jax.random.key(0), (SIZE,))
    before, address = np.array(array), array.unsafe_buffer_pointer()
    settle_on_huge_pages([array])
    np.testing.assert_array_equal(array, before)
    assert array.unsafe_buffer_pointer() == address


@pytest.mark.parametrize(("platform", "backend"), [("darwin", "cpu"), ("linux", "gpu")])
def test_elsewhere_nothing_is_asked(monkeypatch, platform, backend):
    monkeypatch.setattr(huge_pages.sys, "platform", platform)
    monkeypatch.setattr(huge_pages.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(ctypes, "CDLL", None)
    assert settle_on_huge_pages([jnp.zeros(SIZE)]) == 0
