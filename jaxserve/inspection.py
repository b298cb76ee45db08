"""What the sequences in flight are doing, for whoever looks at the server. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from jaxserve.frames import Inspection, Phase, SequenceState
from jaxserve.sequence import Sequence


def inspect(running: Iterable[Sequence], waiting: Iterable[Sequence]) -> Inspection:
    """Every sequence a scheduler has."""
    return Inspection(
        tuple(
            SequenceState(
                sequence.request.request_id,
                phase(sequence),
                sequence.num_computed,
                len(sequence.pages),
                sequence.num_preemptions,
            )
            for sequence in chain(running, waiting)
        )
    )


def phase(sequence: Sequence) -> Phase:
    """A running sequence has a slot. One that lost its pages computes its prompt again."""
    if sequence.slot < 0:
        return "preempted" if sequence.num_preemptions else "waiting"
    return "decode" if sequence.is_decoding else "prefill"
