"""The engine's loop around the real scheduler and a toy device; every step is checked. No jax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

from jaxserve.pages import PagePool
from jaxserve.request import Request, SamplingParams, TokenEvent
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Drawn, Sequence, Span
from jaxserve.swap import Move, SwapCost, SwapSpace

VOCAB = 1009
BAD = 1010  # a prompt with this token in it draws no number
PAGE = 4


def make_request(name: str, num_prompt: int, max_tokens: int, **sampling: Any) -> Request:
    """A request whose prompt differs from that of every other name."""
    first = sum(map(ord, name))
    prompt = tuple((first * 37 + 11 * i) % VOCAB for i in range(num_prompt))
    return Request(name, prompt, SamplingParams(max_tokens, **sampling))


def next_token(tokens: Seq[int]) -> int:
    """What the toy model says after these tokens: a checksum that misses no token and no place."""
    if BAD in tokens:
        return -1
    return sum((i + 1) * (token + 7) for i, token in enumerate(tokens)) % VOCAB


def tokens_alone(request: Request) -> list[int]:
    """What a request must generate, whatever else is being served."""
    tokens = list(request.prompt_ids)
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in request.sampling.stop_token_ids:
            break
    return tokens[len(request.prompt_ids) :]


class ToyDevice:
    """Runs steps in the order given, over a cache of tokens in place of keys and values.

    Like the real one it knows nothing of sequences: it writes and reads through pages and slots
    alone, so a page given away too early, or a token fed from the wrong slot, changes the answer.
    """

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        self._cache = [[BAD] * pool.page_size for _ in range(pool.num_total + 1)]
        self._last_token = [BAD] * num_slots
        self._saved: dict[Sequence, list[list[int]]] = {}

    @property
    def num_saved(self) -> int:
        """Sequences on the host."""
        return len(self._saved)

    def move(self, moves: Seq[Move]) -> None:
        """Between the cache and the host, in the order given."""
        for move in moves:
            if move.way == "out":
                self._saved[move.sequence] = [self._cache[page].copy() for page in move.pages]
            elif move.way == "in":
                saved = self._saved[move.sequence][move.first :]
                for page, content in zip(move.pages, saved, strict=True):
                    self._cache[page] = content.copy()
            else:
                del self._saved[move.sequence]

    def run(self, spans: Seq[Span]) -> list[Drawn]:
        for span in spans:
            if span.copy is not None:
                source, target = span.copy
                self._cache[target] = self._cache[source].copy()
        for span in spans:
            for position in range(span.start, span.stop):
                page, offset = self._place(span, position)
                fed = span.feed and position == span.stop - 1
                known = span.sequence.tokens
                token = self._last_token[span.sequence.slot] if fed else known[position]
                self._cache[page][offset] = token
        drawn = [next_token(self._read(span)) for span in spans]
        for span, token in zip(spans, drawn, strict=True):
            self._last_token[span.sequence.slot] = token
        return [Drawn(token) for token in drawn]

    def _read(self, span: Span) -> list[int]:
        if not span.draws:
            return [0]  # whatever it draws must not matter
        places = (self._place(span, position) for position in range(span.stop))
        return [self._cache[page][offset] for page, offset in places]

    def _place(self, span: Span, position: int) -> tuple[int, int]:
        page_size = len(self._cache[0])
        return span.sequence.pages[position // page_size], position % page_size


class ToyEngine:
    """`jaxserve.engine.Engine`'s loop, with the books kept twice.

    Attributes:
        events: every request's events so far, by id.
        steps: the spans of every step launched.
        streak: most preemptions in a row that one sequence suffered without a token between.
        stall: most steps in a row that the oldest running sequence went without.
    """

    def __init__(
        self,
        *,
        num_pages: int = 100,
        page_size: int = PAGE,
        max_rows: int = 8,
        token_budget: int = 32,
        look_ahead: bool = True,
        prefix_reuse: bool = False,
        swap_pages: int = 0,
        admission_slack: int = 0,
    ) -> None:
        pool = PagePool(num_pages, page_size)
        self.scheduler = Scheduler(
            pool,
            max_rows=max_rows,
            token_budget=token_budget,
            max_context=10_000,
            prefix_reuse=prefix_reuse,
            admission_slack=admission_slack,
            swap=SwapSpace(pool, swap_pages, SwapCost(1.0, 1.0)),
        )
        self.prefix_reuse = prefix_reuse
        self.swaps = swap_pages > 0
        self.events: dict[str, list[TokenEvent]] = {}
        self.steps: list[tuple[Span, ...]] = []
        self.streak = self.stall = 0
        self._stalled = 0
        self._device = ToyDevice(pool, max_rows)
        self._look_ahead = look_ahead
        self._in_flight: tuple[tuple[Span, ...], list[Drawn]] | None = None
        self._books: dict[Sequence, _Book] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def sequence(self, name: str) -> Sequence:
        """The scheduler's record of a request that has not ended."""
        everyone = [*self.scheduler.running, *self.scheduler.waiting]
        (found,) = (s for s in everyone if s.request.request_id == name)
        return found

    def step(self, *, may_idle: bool = False) -> list[TokenEvent]:
        """One step of the loop. The spans it launched are `steps[-1]`, perhaps none.

        may_idle: it may find nothing to compute although there is work.
        """
        spans = self.scheduler.schedule()
        self._check_step(spans)
        if not spans and self.scheduler.has_work and not may_idle:
            assert self._in_flight, "something to do, nothing in flight, and nothing scheduled"
        self._device.move(self.scheduler.take_moves())
        launched = (spans, self._device.run(spans)) if spans else None
        landed, self._in_flight = (
            (self._in_flight, launched) if self._look_ahead else (launched, None)
        )
        events = self.scheduler.commit(*landed) if landed else []
        for event in events:
            self.events.setdefault(event.request_id, []).append(event)
        self.check_conservation()
        return events

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.has_work:
                break
            self.step()
        assert not self.has_work, f"not done after {limit} steps"
        assert self.scheduler.pool.num_live == 0
        assert not self.scheduler.running and not self.scheduler.waiting
        self._device.move(self.scheduler.take_moves())
        assert self._device.num_saved == 0

    def tokens(self, name: str) -> list[int]:
        """What a request produced. At most its last event may lack a token or have a reason."""
        events = self.events.get(name, [])
        assert all(e.finish_reason is None and e.token_id is not None for e in events[:-1])
        return [e.token_id for e in events if e.token_id is not None]

    def _check_step(self, spans: tuple[Span, ...]) -> None:
        self.steps.append(spans)
        scheduler = self.scheduler
        for sequence in (*scheduler.running, *scheduler.waiting):
            book = self._books.setdefault(sequence, _Book())
            self.streak = max(self.streak, book.note_preemptions(sequence))
        assert sum(span.num_tokens for span in spans) <= scheduler.token_budget
        assert len(spans) <= scheduler.max_rows
        assert len({id(span.sequence) for span in spans}) == len(spans), "twice in one step"
        self._check_oldest(spans)
        for span in spans:
            sequence, book = span.sequence, self._books[span.sequence]
            assert sequence in scheduler.running
            # A sequence may start beyond what it computed itself only on pages it found.
            assert book.num_computed <= span.start < span.stop
            assert self.prefix_reuse or self.swaps or book.num_computed == span.start
            num_known = len(sequence.request.prompt_ids) + book.num_drawn
            assert span.draws == (span.stop == num_known)
            assert span.feed == (span.stop > len(sequence.tokens))
            assert span.stop <= len(sequence.pages) * scheduler.pool.page_size
            book.num_computed = span.stop
            book.num_drawn += span.draws
            assert book.num_drawn <= max(1, sequence.request.sampling.max_tokens)

    def _check_oldest(self, spans: tuple[Span, ...]) -> None:
        oldest = self.scheduler.running[0] if self.scheduler.running else None
        served = any(span.sequence is oldest for span in spans)
        idle = oldest is None or not oldest.wants_token
        self._stalled = 0 if served or idle else self._stalled + 1
        self.stall = max(self.stall, self._stalled)

    def check_conservation(self) -> None:
        check_conservation(self.scheduler)
        held = [page for sequence in self.scheduler.running for page in sequence.pages]
        assert self.prefix_reuse or len(held) == len(set(held))


def check_conservation(scheduler: Scheduler) -> None:
    """Every page is free or held, each by as many as the pool thinks; every slot by one."""
    pool = scheduler.pool
    held = Counter(page for sequence in scheduler.running for page in sequence.pages)
    everywhere = range(1, pool.num_total + 1)
    assert set(held) <= set(everywhere)
    assert all(held[page] == pool.num_holders(page) for page in everywhere)
    cached = {page for page in everywhere if pool.is_cached(page)}
    assert not cached & set(held)
    assert pool.num_cached == len(cached)
    assert pool.num_free + len(held) == pool.num_total
    slots = {sequence.slot for sequence in scheduler.running}
    assert len(slots) == len(scheduler.running) <= scheduler.max_rows
    assert slots <= set(range(scheduler.max_rows))
    for sequence in scheduler.waiting:
        assert not sequence.pages and sequence.slot == -1 and sequence.num_computed == 0


class _Book:
    """What the test itself counted for one sequence."""

    def __init__(self) -> None:
        self.num_computed = 0
        self.num_drawn = 0
        self._num_preemptions = 0
        self._drawn_then = -1
        self._streak = 0

    def note_preemptions(self, sequence: Sequence) -> int:
        """Preemptions in a row without a token, as of now."""
        for _ in range(sequence.num_preemptions - self._num_preemptions):
            self._streak = self._streak + 1 if self._drawn_then == self.num_drawn else 1
            self._drawn_then = self.num_drawn
            self.num_computed = 0
        self._num_preemptions = sequence.num_preemptions
        return self._streak


def serve(engine: ToyEngine, *requests: Request) -> None:
    """All at once to their ends, each with the tokens it would have had alone."""
    engine.add(*requests)
    engine.drain()
    for request in requests:
        assert engine.tokens(request.request_id) == tokens_alone(request)
