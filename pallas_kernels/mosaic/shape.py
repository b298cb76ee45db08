"""What a Mosaic kernel is compiled for: the layer's settings, and sizes that fit a Hopper card."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pallas_kernels.tuned import Phase

ROWS = 64
"""Rows of a wgmma: what a warpgroup of 128 threads multiplies at once."""
MULTIPROCESSORS = 132
MAX_PIECE_ROWS = 8

# (phase, head dim up to): (warpgroups, keys a turn, turns in shared memory).
SIZES: dict[tuple[Phase, int], tuple[int, int, int]] = {
    ("prefill", 64): (2, 128, 4),
    ("prefill", 128): (2, 128, 2),
    ("prefill", 256): (2, 64, 2),
    ("decode", 64): (1, 128, 5),
    ("decode", 128): (1, 64, 4),
    ("decode", 256): (1, 64, 2),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What an attention kernel is compiled for.

    Attributes:
        scale: factor on q.k.
        window: keys a query sees, or None.
        soft_cap: bound of scores, or None.
        group: query heads per KV head.
        head_dim: D.
        page_size: B.
        warpgroups: that compute; each takes `ROWS` rows.
        queries: of a warpgroup; their heads are its rows.
        keys: keys a turn of the loop.
        turns: keys and values of so many turns have room in shared memory.
    """

    scale: float
    window: int | None
    soft_cap: float | None
    group: int
    head_dim: int
    page_size: int
    warpgroups: int
    queries: int
    keys: int
    turns: int

    @property
    def pitch(self) -> int:
        """Rows from one query's heads to the next one's: a TMA copy begins at 128 bytes."""
        return pitch(self.group, self.head_dim)

    @property
    def registers(self) -> int:
        """Of each thread that computes: what the card has, less the producer's."""
        return 248 if self.warpgroups == 1 else 232

    @property
    def swizzle(self) -> int:
        """Bytes of a row within which shared memory is permuted, against bank conflicts."""
        return math.gcd(128, 2 * self.head_dim)

    @property
    def width(self) -> int:
        """Columns that are copied in and out at a time, row after row."""
        return self.head_dim if self.head_dim <= 128 else 64

    @property
    def piece(self) -> int:
        """Keys of a page that one copy brings."""
        return math.gcd(self.page_size, self.keys)


def pitch(group: int, head_dim: int) -> int:
    """Rows of shared memory, of 2-byte elements, that a query's heads take."""
    grain = 128 // math.gcd(128, 2 * head_dim)
    return -(-group // grain) * grain


def sizes(phase: Phase, head_dim: int) -> tuple[int, int, int]:
    """Of `SIZES`."""
    return SIZES[phase, next(most for most in (64, 128, 256) if head_dim <= most)]


def query_block(group: int, head_dim: int) -> int:
    """Positions of a prefill tile: what `plan_launch` cuts a step into."""
    return sizes("prefill", head_dim)[0] * queries(group, head_dim)


def queries(group: int, head_dim: int) -> int:
    """Of a warpgroup."""
    return ROWS // pitch(group, head_dim)


def piece_rows(group: int, head_dim: int) -> int:
    """Decodes that one program can take at once, where they share their pages."""
    return min(MAX_PIECE_ROWS, queries(group, head_dim))
