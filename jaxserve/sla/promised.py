"""The promise: so many percent of the requests get their first token within TTFT, and the next ones
within TPOT on average. Plain Python; the scheduler asks, this answers.

**What a step costs** is predicted by a model that starts from the device's roofline and is fitted
to every step (`step_time`). Everything below is arithmetic on it.

**How many run** (`pace`): the most sequences for which a step that decodes all of them, their keys
and values read, and prefills as many prompt tokens as come in meanwhile (up to half a step), stays
below TPOT. Not memory: with pages for 300 sequences and time for 80, the 300 would all be slow.

**How much prefill a step carries**: what TPOT leaves beside the decodes. When that would make a
prompt late, every second step may leave the decodes out, or steps may be twice as long where that
is quicker, as long as all decodes can spare the time: TPOT is a request's mean, and `pace` sees to
it that the mean is kept.

**Whose turn it is** (`turns`): prompts by deadline; if not all can make it, those with the most
left step back, so that the fewest are late. Tenants share equally. If a prompt has waited
`PATIENCE` times TTFT, the oldest one gets a quarter of every step, so nobody starves.

**Who is let in.** The same computation with the newcomer in it says whether it, or somebody because
of it, will be late. If nobody is, it is let in. If somebody is, that is a miss, and the promise
allows some: one in twenty at the 95th percentile. As long as the allowance lasts (`ladder`), the
newcomer is let in; once it is spent it is refused at once, with a time to come again that keeps a
place for it (`retry`). Nobody waits in vain. A prompt too long to be ready in time on an idle
server is let in while the others keep their time and its turn comes soon: refusing it for ever
would help nobody.

**The ladder**: fewer run as soon as misses of TPOT are being spent. When either allowance comes to
its end, (1) new answers are cut to the length that most recent ones stayed below, if rows are what
is short; when it is at its end, (2) requests are refused. Running streams are never slowed down to
make room for new ones.

**The batch class** runs in steps that no interactive prompt waits for, and is preempted first.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

from jaxserve.drain import Drain
from jaxserve.policy import OLDEST_SHARE, QUEUE_FULL, Allowance, Load, Refusal, Report
from jaxserve.request import RefusalReason, Request
from jaxserve.sequence import Sequence, Span
from jaxserve.sla.ladder import DEPTH, RUNGS, Ladder, MissAllowance
from jaxserve.sla.outlook import Hurry, Outlook, look
from jaxserve.sla.pace import Decodes, Pace
from jaxserve.sla.retry import Places
from jaxserve.sla.step_time import TERMS, StepLoad, StepTimeModel, step_load
from jaxserve.sla.turns import Prompt, Turns
from jaxserve.workload import Promise

PATIENCE = 10.0
"""Times the promised TTFT after which a prompt gets a share of every step."""
FEWER = 0.85
"""The running limit is multiplied by this while TPOT is what suffers."""
SLOW = 2.0
"""Misses of TPOT that are allowed at first. It suffers while fewer are left, and more of TTFT's: a
server that has just started does not, and its first slow answer is heeded at once."""
LIMIT_PERIOD = 0.25
LIMIT_STEP = 0.99
"""The running limit is looked at every so many seconds, and falls to no less than that."""
MIX_SECONDS = 30.0
"""Over which the proportion of prompt to output tokens is measured."""
SHORT_OF_ROWS = 0.9
"""Of the running limit: from here on shorter answers would help. Where prefill is what is short,
they would not."""
SHORTEST_CUT = 64
"""Answers are never cut below this many tokens on the first rung."""
HASTE = 0.1
"""Of the promised TTFT: if prompts would be late if this much came between, they are hurried."""
CROWDED = 0.15
"""Of the allowed misses: from here on the server counts as crowded, if that share of them was not
due to a prompt's own length."""
KEPT = 0.8
"""Of the promised TTFT, at most, is kept for a client told to come again: no set of prompts could
hold more."""
CAUTION = 0.01
"""Of the promised TTFT, per miss: the less of the allowance is left below `RESERVE`, the later a
newcomer's first token is expected. So misses that nobody predicted are made good."""
RESERVE = 2.0
CROWD_MEMORY = 300
"""Requests over which that is measured."""
REFUSING_SECONDS = 30.0
"""After a refusal: the time that counts as one in which requests are refused."""
MESSAGES: Mapping[RefusalReason, str] = {
    "late": "the server is at the limit of what it can answer in time",
    "full": QUEUE_FULL,
    "deadline": "the request cannot be answered before its deadline",
}


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step that the device was given: what it is, how long it should take, and whether it leaves
    the decodes out."""

    load: StepLoad
    seconds: float
    left_out: bool


class Promised:
    """The policy that keeps a promise."""

    def __init__(
        self,
        promise: Promise,
        model: StepTimeModel,
        *,
        max_queue: int = 256,
        max_tokens_cap: int | None = None,
        prompt_per_output: float = 4.0,
    ) -> None:
        """Args:
        promise: to keep.
        model: of this device, seeded; it is fitted from now on.
        max_queue: most requests that wait.
        max_tokens_cap: most tokens of an answer, always.
        prompt_per_output: prompt tokens per output token, until they have been counted.
        """
        self.promise = promise
        self.pace = Pace(model, promise.tpot)
        self.ladder = Ladder()
        self.refusals: Counter[RefusalReason] = Counter()
        self.running_limit = 1
        self._limit = 1.0
        self._max_queue = max_queue
        self._max_tokens_cap = max_tokens_cap
        share = 1 - promise.percentile / 100
        self._ttft_left = MissAllowance(share)
        self._tpot_left = MissAllowance(share, first=SLOW)
        self._crowding = 0.0
        self._last_refusal = -math.inf
        self._crowded = CROWDED * share
        self._places = Places()
        self._lengths: deque[int] = deque(maxlen=200)
        self._drain = Drain()
        self._prompt_tokens, self._output_tokens = 500 * prompt_per_output, 500.0
        self._context = 512.0
        self._next_look = 0.0
        self._order: dict[object, tuple[float, ...]] = {}
        self.device_free = 0.0
        self._ahead: deque[_Ahead] = deque()
        self._leave_out = False
        self._since_token = 0.0
        self._rows_are_short = False
        self._greedy: set[str] = set()

    def judge(self, sequence: Sequence, load: Load, now: float) -> Refusal | None:
        if len(load.waiting) >= self._max_queue:
            return self._refuse(
                "full", sequence, now, 1.0, len(load.waiting) / self._drain.rate(now)
            )
        if sequence.is_batch:
            return None
        # As far as expectations have been off they may be again, and misses want to be made good.
        caution = self.pace.model.error + CAUTION * max(0.0, RESERVE - self._ttft_left.left)
        outlook = self._look(load, now, caution * self.promise.ttft + self.pace.calm / 2)
        returning = self._places.claim(sequence.request, now)
        places = [] if returning else self._kept_places(now)
        slot_seconds = self._slot_seconds(load, sequence.request.tenant, places)
        work = outlook.work(sequence) / outlook.speed(self.pace.seconds)
        due = sequence.arrived + self.promise.ttft
        # Waiting for a slot first is the same as having that much less time.
        newcomer = Prompt(sequence, due - slot_seconds, work, sequence.request.tenant)
        before = outlook.turns(self.pace.seconds, *places)
        after = outlook.turns(self.pace.seconds, *places, newcomer)
        ready = after.ready(newcomer, outlook.begin) + slot_seconds
        patience = sequence.request.deadline
        if patience is not None and ready > sequence.arrived + patience:
            return self._refuse("deadline", sequence, now, work, 1.0)
        if newcomer in after.early and len(after.late) <= len(before.late):
            return None
        turn_comes = ready - work
        if self._is_hopeless(sequence) and self._crowding < self._crowded and turn_comes < due:
            return None
        self._move(len(after.late) + (newcomer in after.beyond))
        if self.ladder.rung < len(RUNGS) - 1:
            return None
        # Who was told to come now is let in, even if others make it late, within reason.
        if returning and turn_comes < due + 0.5 * self.promise.ttft:
            return None
        if slot_seconds:
            work = max(work, self._slot_interval(load))
        return self._refuse("late", sequence, now, work, ready - due)

    def max_tokens(self, request: Request) -> int:
        asked = request.sampling.max_tokens
        if self._max_tokens_cap is not None:
            asked = min(asked, self._max_tokens_cap)
        if self.ladder.rung >= 1 and self._rows_are_short and self._lengths:
            usual = sorted(self._lengths)[math.ceil(0.95 * len(self._lengths)) - 1]
            asked = min(asked, max(SHORTEST_CUT, usual))
        return asked

    def plan(self, load: Load, now: float) -> Allowance:
        if now >= self._next_look:
            self._next_look = now + LIMIT_PERIOD
            self._set_limit(load)
        self._rows_are_short = len(load.running) >= SHORT_OF_ROWS * self.running_limit
        outlook = self._look(load, now)
        turns, hurry = self._take_turns(outlook)
        if not self._can_prefill(outlook, load):
            hurry = None
        self._leave_out = hurry == "leave out" and not self._leave_out
        self._move(len(turns.late))
        self._order = turns.keys()
        self._greedy = outlook.greedy(self.running_limit)
        starving = any(self._has_waited(sequence, now) for sequence in outlook.prompts)
        return Allowance(
            running_limit=self.running_limit,
            prefill_tokens=self._room(outlook, turns.early, hurry, load),
            chunk=load.token_budget,
            oldest_share=OLDEST_SHARE if starving else 0.0,
            batch=not outlook.prompts,
            decode=not self._leave_out,
        )

    def turn(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        if sequence.is_batch:
            return (4.0, sequence.arrived)
        if sequence.first_token is not None:
            return (-2.0, sequence.arrived)  # preempted: its stream stands still
        if sequence.slot < 0 and sequence.request.tenant in self._greedy:
            return (3.0, sequence.arrived)
        if sequence.slot < 0 and self._has_waited(sequence, now):
            return (-1.0, sequence.arrived)
        return self._order.get(sequence, (3.0, sequence.arrived))

    def observe_launch(self, spans: Collection[Span], now: float) -> None:
        load = step_load(spans)
        seconds = self.pace.model.predict(load)
        left_out = self._leave_out and all(span.sequence.num_drawn == 0 for span in spans)
        self._ahead.append(_Ahead(load, seconds, left_out))
        self.device_free = max(now, self.device_free) + seconds

    def observe_step(self, spans: Collection[Span], seconds: float, now: float) -> None:
        done = self._ahead.popleft()
        self.device_free = now + sum(step.seconds for step in self._ahead)
        self.pace.model.observe(done.load, seconds)
        self._since_token += seconds
        if not done.left_out:
            self.pace.count(self._since_token)
            self._since_token = 0.0
        fade = math.exp(-seconds / MIX_SECONDS)
        drawn = sum(span.draws for span in spans)
        prompt = sum(span.num_tokens for span in spans if span.num_tokens > 1)
        self._prompt_tokens = self._prompt_tokens * fade + prompt
        self._output_tokens = self._output_tokens * fade + drawn

    def observe_first_token(self, sequence: Sequence, now: float) -> None:
        if sequence.is_batch:
            return
        missed = now - sequence.arrived > self.promise.ttft
        self._ttft_left.count(missed, refusing=self._is_refusing(now))
        crowded_out = missed and not self._is_hopeless(sequence)
        self._crowding += (crowded_out - self._crowding) / CROWD_MEMORY

    def observe_finish(self, sequence: Sequence, now: float) -> None:
        self._drain.note(now)
        self._lengths.append(sequence.num_drawn)
        if sequence.first_token is not None and sequence.num_drawn > 1 and not sequence.is_batch:
            tpot = (now - sequence.first_token) / (sequence.num_drawn - 1)
            self._tpot_left.count(tpot > self.promise.tpot, refusing=self._is_refusing(now))

    def report(self) -> Report:
        return Report(
            running_limit=self.running_limit,
            rung=self.ladder.rung,
            refused=dict(self.refusals),
            predicted_seconds=self._ahead[-1].seconds if self._ahead else 0.0,
            prediction_error=self.pace.model.error,
            step_factors=dict(zip(TERMS, self.pace.model.factors, strict=True)),
        )

    def _look(self, load: Load, now: float, caution: float = 0.0) -> Outlook:
        return look(load, self.pace, self.promise.ttft, max(now, self.device_free) + caution)

    def _take_turns(self, outlook: Outlook) -> tuple[Turns, Hurry | None]:
        """Whose turn it is, and how prompts at risk are hurried."""
        seconds = self.pace.seconds
        tight = outlook.later(HASTE * self.promise.ttft)
        if outlook.to_spare < seconds or not tight.turns(seconds).late:
            return outlook.turns(seconds), None
        return outlook.turns(2 * seconds), outlook.hurry(seconds)

    def _can_prefill(self, outlook: Outlook, load: Load) -> bool:
        """Whether any prompt holds a slot, or can get one: hurrying the others is no use."""
        if len(load.running) < min(self.running_limit, load.max_rows):
            return True
        return any(sequence.slot >= 0 for sequence in outlook.prompts)

    def _room(self, outlook: Outlook, early: list[Prompt], hurry: Hurry | None, load: Load) -> int:
        """Prompt tokens that the next step has room for."""
        decodes, prompts = outlook.decodes, outlook.prompts
        if decodes.rows == len(load.running) + len(load.waiting):
            return 0
        beside = Decodes(0, 0) if self._leave_out else decodes
        seconds = self.pace.seconds * (2 if hurry == "long step" else 1)
        start = prompts[0].num_computed if prompts else 0
        room = self.pace.prefill_tokens(beside, start, seconds, outlook.most)
        if hurry is not None and early:
            # It is ready at the end of a step: others in its last one would make it later.
            room = min(room, cast(Sequence, early[0].key).num_pending)
        return room

    def _is_refusing(self, now: float) -> bool:
        return now - self._last_refusal < REFUSING_SECONDS

    def _has_waited(self, sequence: Sequence, now: float) -> bool:
        return now - sequence.arrived > PATIENCE * self.promise.ttft

    def _is_hopeless(self, sequence: Sequence) -> bool:
        """Whether its prompt would be late even on an idle server."""
        cached = sequence.num_prompt - sequence.num_uncached
        alone = self.pace.model.prompt_seconds(cached, sequence.num_uncached)
        return alone + self.pace.calm > self.promise.ttft

    def _move(self, num_late: int) -> None:
        """Set the rung: with those who will be late as good as missed."""
        left = min(self._ttft_left.left - num_late, self._tpot_left.left)
        self.ladder.move(1 - left / DEPTH)

    def _set_limit(self, load: Load) -> None:
        if load.running:
            known = sum(sequence.num_known for sequence in load.running)
            self._context += (known / len(load.running) - self._context) * 0.2
        ratio = self._prompt_tokens / self._output_tokens
        limit = self.pace.running_limit(self._context, ratio, load.max_rows)
        # Where first tokens are what is late, fewer running would only lengthen the queue.
        too_slow = self._tpot_left.left < min(SLOW, self._ttft_left.left)
        wanted = max(1, round(limit * FEWER)) if too_slow else limit
        # Those who wait were let in with the old limit in mind: it falls little by little.
        self._limit = max(float(wanted), self._limit * LIMIT_STEP)
        self.running_limit = math.ceil(self._limit)

    def _kept_places(self, now: float) -> list[Prompt]:
        """The work kept for those who were told to come about now, as far as they do come."""
        ttft, share = self.promise.ttft, self._places.returning
        return [
            Prompt(place, place.due + ttft, min(place.work, KEPT * ttft) * share, place.tenant)
            for place in self._places.due(now, ttft)
        ]

    def _slot_seconds(self, load: Load, tenant: str, places: list[Prompt]) -> float:
        """How long a newcomer waits until few enough run. Who has less than its share of the rows
        does not wait behind those who have more."""
        behind = set() if tenant in self._greedy else self._greedy
        # The batch class makes way at once.
        ahead = sum(not sequence.is_batch for sequence in load.running)
        ahead -= min(self.running_limit, load.max_rows)
        ahead += sum(
            not sequence.is_batch and sequence.request.tenant not in behind
            for sequence in load.waiting
        )
        kept = sum(place.tenant not in behind for place in places)
        over = ahead + kept * self._places.returning
        return 0.0 if over < 0 else (over + 1) * self._slot_interval(load)

    def _slot_interval(self, load: Load) -> float:
        """Seconds from one running sequence making way to the next, if as many run as may."""
        lengths = self._lengths or [s.request.sampling.max_tokens for s in load.running]
        rows = max(1, min(self.running_limit, load.max_rows))
        return sum(lengths) / max(1, len(lengths)) * self.pace.usual / rows

    def _refuse(
        self, reason: RefusalReason, sequence: Sequence, now: float, work: float, earliest: float
    ) -> Refusal:
        self.refusals[reason] += 1
        self._last_refusal = now
        wait = earliest
        if reason != "deadline":
            wait = self._places.reserve(sequence.request, now, earliest=earliest, work=work)
        return Refusal(reason, MESSAGES[reason], wait)
