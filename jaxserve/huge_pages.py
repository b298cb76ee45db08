"""Large arrays of a CPU's memory on large pages.

A step reads all weights and much of the cache. On pages of 4 KiB that is a walk through the page
table for every 64 lines, and a virtual machine walks two tables.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterable

import jax

logger = logging.getLogger("jaxserve.huge_pages")

SIZE = 2 << 20
"""Bytes of a huge page: what x86 has, and arm64 with pages of 4 KiB."""
HUGEPAGE, COLLAPSE = 14, 25
"""MADV_HUGEPAGE and MADV_COLLAPSE of Linux; the second, from 6.1 on, does it at once."""


def settle_on_huge_pages(arrays: Iterable[jax.Array]) -> int:
    """Move arrays to huge pages where the operating system has any to give.

    Only where they lie changes, not their address: whoever holds them notices nothing. A state
    that is donated from step to step stays where it is.

    Returns:
        Bytes that were asked for: 0 on a device that is no CPU, and off Linux.
    """
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    asked = 0
    for array in arrays:
        first = array.unsafe_buffer_pointer()
        start = -(-first // SIZE) * SIZE
        length = (first + array.nbytes) // SIZE * SIZE - start
        if length <= 0:
            continue
        if advise(start, length, HUGEPAGE) or advise(start, length, COLLAPSE):
            # Not built into this kernel, or nothing that large is free: as it was, then.
            logger.debug("no huge pages: errno %d", ctypes.get_errno())
            return asked
        asked += length
    return asked
