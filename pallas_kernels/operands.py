"""What the attention kernels of every GPU dialect are given."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

MASKED = -1e30
"""Where the running maximum starts. Finite: masked scores, which are -inf, weigh exactly 0."""


class CacheRefs(NamedTuple):
    """One layer's pages: k, v [N, B, K, D], scales [N, B, K] or None, page table [R, P]."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    table: Any


class Keys(NamedTuple):
    """The keys that a program looks at.

    Attributes:
        row: whose. head: KV head. length: keys the row has: later places belong to nobody.
        first_turn, stop_turn: groups of as many keys as the kernel takes a turn, counted from the
            row's first.
    """

    row: jax.Array
    head: jax.Array
    length: jax.Array
    first_turn: jax.Array
    stop_turn: jax.Array
