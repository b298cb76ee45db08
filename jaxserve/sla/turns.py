"""Whose turn it is: prompts by deadline, as long as all of them can make it.

Every interactive prompt has a deadline, its arrival plus the promised time to first token. Done in
order of deadline, a set of prompts is ready on time if any order makes it so. If somebody would be
late, the fewest are late when, again and again, the one with the most left to compute, of those up
to the first late one, steps back (Moore and Hodgson, 1968). Who has stepped back comes after all
others, least remaining first.

A tenant's prompts take part as far as its equal share of the time goes; what it has beyond that
comes after everybody's share, so a flood of one tenant makes that tenant late, and nobody else.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt that waits for its first token.

    Attributes:
        key: whose it is, for the caller.
        deadline: when it should be ready, in seconds of any clock.
        work: seconds of prefill it still needs.
        tenant: who asked.
    """

    key: object
    deadline: float
    work: float
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Turns:
    """Prompts in the order they should be computed.

    Attributes:
        early: those that will be ready on time, in order of deadline.
        beyond: those over their tenant's share, in order of deadline.
        late: those that will not be ready on time, least work first.
    """

    early: list[Prompt]
    beyond: list[Prompt]
    late: list[Prompt]

    def keys(self) -> dict[object, tuple[float, ...]]:
        """For each prompt's key a sort key."""
        groups = (self.early, self.beyond, self.late)
        return {
            prompt.key: (float(group), float(place))
            for group, prompts in enumerate(groups)
            for place, prompt in enumerate(prompts)
        }

    def ready(self, prompt: Prompt, start: float) -> float:
        """When a prompt will be ready, if the first begins at `start` and nobody else comes."""
        for other in (*self.early, *self.beyond, *self.late):
            start += other.work
            if other is prompt:
                return start
        raise ValueError("the prompt is not among those that take turns")


def take_turns(prompts: Iterable[Prompt], start: float, window: float) -> Turns:
    """Order prompts so that as many as possible are on time.

    Args:
        prompts: in any order.
        start: when the first can begin.
        window: seconds of prefill that the tenants divide if not everybody can be on time.
    """
    by_deadline = sorted(prompts, key=lambda prompt: prompt.deadline)
    early, late = _on_time(by_deadline, start)
    tenants = {prompt.tenant for prompt in by_deadline}
    if not late or len(tenants) < 2:
        return Turns(early, [], late)
    within, beyond = _shares(by_deadline, window / len(tenants))
    early, late = _on_time(within, start)
    return Turns(early, beyond, late)


def _on_time(by_deadline: list[Prompt], start: float) -> tuple[list[Prompt], list[Prompt]]:
    kept: list[tuple[float, int, Prompt]] = []
    late: list[Prompt] = []
    now = start
    for index, prompt in enumerate(by_deadline):
        heapq.heappush(kept, (-prompt.work, index, prompt))
        now += prompt.work
        if now > prompt.deadline:
            _, _, longest = heapq.heappop(kept)
            now -= longest.work
            late.append(longest)
    early = [prompt for _, _, prompt in sorted(kept, key=lambda entry: entry[1])]
    return early, sorted(late, key=lambda prompt: prompt.work)


def _shares(by_deadline: list[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Each tenant's prompts up to `share` seconds of work, at least one; and the others."""
    taken: dict[str, float] = {}
    within: list[Prompt] = []
    beyond: list[Prompt] = []
    for prompt in by_deadline:
        before = taken.get(prompt.tenant, 0.0)
        fits = before == 0.0 or before + prompt.work <= share
        (within if fits else beyond).append(prompt)
        taken[prompt.tenant] = before + prompt.work * fits
    return within, beyond
