"""What is known at one moment: who decodes, who waits for a first token, and when each will get it.

Prefill goes on beside decodes, so a second of it takes more than a second: its speed is the share
of a step's time that is left for it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from jaxserve.policy import Load
from jaxserve.sequence import Sequence
from jaxserve.sla.pace import Decodes, Pace
from jaxserve.sla.turns import Prompt, Turns, take_turns

Hurry = Literal["leave out", "long step"]


@dataclass(frozen=True, slots=True)
class Outlook:
    """One moment.

    Attributes:
        decodes: sequences that draw a token in every step.
        prompts: interactive sequences that wait for their first token.
        to_spare: seconds by which their tokens may all come later, without one that can still keep
            its TPOT losing it.
        held: interactive sequences that run, by tenant; 0 for tenants that only wait.
        begin: when the first of them can begin: after the step in flight and what preempted
            sequences have to compute again; and half a step more, for a prompt's last tokens share
            a step with the next prompt's first.
        most: prefill tokens that a step can hold.
        pace: step times.
        ttft: promised.
    """

    decodes: Decodes
    prompts: list[Sequence]
    to_spare: float
    held: Counter[str]
    begin: float
    most: int
    pace: Pace
    ttft: float

    def turns(self, seconds: float, *others: Prompt) -> Turns:
        """The order of the prompts, and of others, if steps take this long."""
        if not self.prompts and not others:
            return Turns([], [], [])
        speed = self.speed(seconds)
        prompts = [
            Prompt(s, s.arrived + self.ttft, self.work(s) / speed, s.request.tenant)
            for s in self.prompts
        ]
        return take_turns([*prompts, *others], self.begin, self.ttft)

    def later(self, seconds: float) -> Outlook:
        """The same, if something else were done first."""
        return replace(self, begin=self.begin + seconds)

    def hurry(self, seconds: float) -> Hurry | None:
        """How to get prompts done sooner than with steps of so many seconds.

        Leaving decodes out of every second one is better for newcomers. But a device may need
        longer steps to get anywhere: twice the tokens in less than twice the time.
        """
        if not self.decodes.rows:
            return None

        def room(decodes: Decodes, seconds: float) -> int:
            return self.pace.prefill_tokens(decodes, TYPICAL_START, seconds, self.most)

        alternating = room(self.decodes, seconds) + room(Decodes(0, 0), seconds)
        together = room(self.decodes, 2 * seconds)
        return "long step" if together > 1.2 * alternating else "leave out"

    def speed(self, seconds: float) -> float:
        """Seconds of prefill, as if nothing else were going on, that one second has room for."""
        room = self.pace.prefill_tokens(self.decodes, TYPICAL_START, seconds, self.most)
        took = self.pace.step_seconds(self.decodes, room, TYPICAL_START)
        return self.pace.model.prompt_seconds(TYPICAL_START, room) / took

    def greedy(self, running_limit: int) -> set[str]:
        """Tenants that hold their share of the rows, or more, while there are others."""
        if len(self.held) < 2:
            return set()
        share = running_limit / len(self.held)
        return {tenant for tenant, rows in self.held.items() if rows >= share}

    def work(self, sequence: Sequence) -> float:
        """Seconds of prefill, as if nothing else were going on, that a sequence still needs."""
        left = sequence.num_pending
        if sequence.num_computed == 0:
            left = min(left, sequence.num_uncached)
        return self.pace.model.prompt_seconds(sequence.num_known - left, left)


TYPICAL_START = 500
"""Tokens before a chunk, where it does not matter whose chunk it is."""


def look(load: Load, pace: Pace, ttft: float, begin: float) -> Outlook:
    """Sort out who is doing what. `begin` is when the next step can begin."""
    rows = kv_tokens = 0
    to_spare = math.inf
    prompts = []
    held: Counter[str] = Counter()
    for sequence in (*load.running, *load.waiting):
        if sequence.is_decoding:
            rows += 1
            kv_tokens += sequence.num_computed
        if sequence.is_batch:
            continue
        held[sequence.request.tenant] += sequence.slot >= 0
        if sequence.is_decoding:
            if sequence.first_token is not None:
                spare = pace.to_spare(sequence.num_drawn, begin - sequence.first_token)
                to_spare = min(to_spare, spare if spare > 0 else math.inf)
            continue
        if sequence.first_token is not None:
            left = sequence.num_pending - sequence.num_swapped
            begin += pace.model.prompt_seconds(sequence.num_known - left, left)
        elif sequence.num_drawn == 0:
            prompts.append(sequence)
    most = max(1, load.token_budget - rows)
    return Outlook(Decodes(rows, kv_tokens), prompts, to_spare, held, begin, most, pace, ttft)
