"""Tile sizes of the GPU kernels, by card and head dim.

A tile is (rows of the dot, keys a turn, warps, pipeline stages). What is here compiles without
spills on its card; no time stands behind it yet.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Phase = Literal["prefill", "decode"]

CARDS = ("sm_80", "sm_90")
MIN_ROWS = 16  # of a Triton dot
PROGRAMS = {"sm_80": 108 * 4, "sm_90": 132 * 4}
"""Decode programs that fill a card: its multiprocessors, times what one holds at once."""


class Tile(NamedTuple):
    """How one program of a kernel works.

    Attributes:
        query_block: queries of one row that it takes; their heads are further rows of its dots.
        keys: keys a turn of its loop, from as many pages as that takes.
        num_warps: warps of 32 threads.
        num_stages: depth of the software pipeline.
    """

    query_block: int
    keys: int
    num_warps: int
    num_stages: int


# (card, phase, padded head dim): (rows of the dot, keys a turn, warps, stages).
SIZES: dict[tuple[str, Phase, int], tuple[int, int, int, int]] = {
    ("sm_80", "prefill", 64): (128, 64, 8, 3),
    ("sm_80", "prefill", 128): (128, 32, 8, 3),
    ("sm_80", "prefill", 256): (64, 32, 8, 2),
    ("sm_80", "decode", 64): (16, 128, 4, 3),
    ("sm_80", "decode", 128): (16, 64, 4, 3),
    ("sm_80", "decode", 256): (16, 32, 4, 3),
    ("sm_90", "prefill", 64): (128, 64, 8, 3),
    ("sm_90", "prefill", 128): (128, 64, 8, 2),
    ("sm_90", "prefill", 256): (64, 32, 8, 2),
    ("sm_90", "decode", 64): (16, 128, 4, 3),
    ("sm_90", "decode", 128): (16, 64, 4, 3),
    ("sm_90", "decode", 256): (16, 32, 4, 3),
}


def tile(card: str, head_dim: int, group: int, phase: Phase, itemsize: int) -> Tile:
    """The tile for a kernel's shapes.

    Args:
        card: one of `CARDS`.
        head_dim: D. group: query heads per KV head.
        phase: which kernel.
        itemsize: bytes of a query's element. Four-byte dots run on no tensor core: small tiles.
    """
    padded = max(64, padded_size(head_dim))
    if card not in CARDS or padded > 256:
        raise ValueError(
            f"no tiles for card {card!r} and head_dim {head_dim}: "
            f"known are {', '.join(CARDS)} and head dims up to 256"
        )
    rows, keys, num_warps, num_stages = SIZES[card, phase, padded]
    if itemsize > 2:
        rows, keys, num_warps, num_stages = (32, 32, 8, 1) if padded < 256 else (16, 16, 8, 1)
    heads = padded_size(group)
    block = 1 if phase == "decode" else max(1, rows // heads, MIN_ROWS // heads)
    return Tile(block, keys, num_warps, num_stages)


def piece_rows(group: int) -> int:
    """Decodes that one program can take at once: their heads fill the rows of its dots, which are
    as many for one decode, so that a row's bits do not depend on who else is there."""
    return max(1, MIN_ROWS // padded_size(group))


def padded_size(size: int) -> int:
    """The next power of two: what a tile's sides have to be."""
    return 1 << (size - 1).bit_length()
