"""Who gets how many of a step's prefill tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

from jaxserve.policy import Allowance
from jaxserve.sequence import Sequence


def share_out(
    prompts: Seq[Sequence],
    budget: int,
    allowance: Allowance,
    turn: Callable[[Sequence], tuple[float, ...]],
) -> list[tuple[Sequence, int]]:
    """Divide the prefill tokens: the oldest prompt's share, then whose turn it is.

    Args:
        prompts: that could compute on, the one admitted first in front.
        budget: tokens there are.
        allowance: what the policy says.
        turn: smaller goes first.

    Returns:
        Sequences with their tokens, in the order to place them.
    """
    if not prompts or budget <= 0:
        return []

    def wanted(sequence: Sequence) -> int:
        return min(sequence.num_pending, allowance.chunk)

    share: dict[Sequence, int] = {}
    if allowance.oldest_share:
        oldest = prompts[0]
        share[oldest] = min(wanted(oldest), math.ceil(budget * allowance.oldest_share))
        budget -= share[oldest]
    for sequence in sorted(prompts, key=turn):
        more = min(wanted(sequence) - share.get(sequence, 0), budget)
        if more > 0:
            share[sequence] = share.get(sequence, 0) + more
            budget -= more
    return list(share.items())
