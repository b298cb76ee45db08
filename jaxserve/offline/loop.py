"""Drives an engine until everything asked of it is answered. Knows neither files nor bars."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from jaxserve.engine import Engine
from jaxserve.errors import JaxserveError, Overloaded, RequestError
from jaxserve.grammar import Grammars
from jaxserve.request import PromptLogprob, TokenEvent
from jaxserve.server.choice import Choice
from jaxserve.server.generation import Generation
from jaxserve.server.replies import AnswerEnd
from jaxserve.server.text import Tokenizer

AHEAD = 2
"""Sequences handed to the engine, in multiples of its rows: it always has who comes next."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt.

    Attributes:
        prompt_ids: what was continued.
        token_ids: generated, the one that ended it included.
        text: of them, up to a stop string.
        finish_reason: "stop" or "length".
        logprobs: of each token, if asked for: its natural log-probability.
        top_logprobs: with them: (token id, log-probability) of the likeliest, likeliest first.
        prompt_logprobs: of every prompt token but the first, if asked for.
        num_cached: prompt tokens that other prompts had computed already.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: AnswerEnd | None
    logprobs: tuple[float, ...] | None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None
    prompt_logprobs: tuple[PromptLogprob, ...] | None
    num_cached: int


class Pending:
    """A completion in the making."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self._request = generation.requests[0]
        self._choice = Choice(generation, 0, tokenizer)
        self._events: list[TokenEvent] = []
        self._text: list[str] = []

    def push(self, event: TokenEvent) -> bool:
        """Take an event. True if the text has ended while the engine would go on.

        Raises:
            JaxserveError: there will be no answer.
        """
        if self._choice.finish_reason is None:
            self._events.append(event)
        stop = self._choice.push(event)
        if (delta := self._choice.take()) is not None:
            self._text.append(delta.text)
        return stop

    @property
    def completion(self) -> Completion | None:
        """The answer, once it has ended."""
        if self._choice.finish_reason is None:
            return None
        tokens = [event for event in self._events if event.token_id is not None]
        sampling = self._request.sampling
        scored = sampling.top_logprobs is not None
        return Completion(
            prompt_ids=self._request.prompt_ids,
            token_ids=tuple(event.token_id for event in tokens if event.token_id is not None),
            text="".join(self._text),
            finish_reason=self._choice.finish_reason,
            logprobs=tuple(e.logprob for e in tokens if e.logprob is not None) if scored else None,
            top_logprobs=tuple(event.top_logprobs for event in tokens) if scored else None,
            prompt_logprobs=(
                None if sampling.prompt_logprobs is None else self._events[0].prompt_logprobs
            ),
            num_cached=self._choice.num_cached,
        )


def complete_all(
    engine: Engine, grammars: Grammars, tokenizer: Tokenizer, generations: Iterable[Generation]
) -> Iterator[tuple[int, Completion | JaxserveError]]:
    """(place in the order asked, answer or what went wrong) of each generation, as they end.

    Each asks for one sequence. They are taken as there is room, so there may be any number. Left
    early, in whatever way, nothing of them stays in the engine. Ctrl-C takes effect between two
    steps: a step that was broken off could leave an engine without its cache.
    """
    upcoming = enumerate(generations)
    pending: dict[str, tuple[int, Pending]] = {}
    room = AHEAD * engine.scheduler.max_rows
    try:
        with interrupts_between_steps() as check:
            while True:
                while len(pending) < room and (following := next(upcoming, None)) is not None:
                    index, generation = following
                    error = start(engine, grammars, generation)
                    if error is not None:
                        yield index, error
                        continue
                    name = generation.requests[0].request_id
                    pending[name] = index, Pending(generation, tokenizer)
                if not pending:
                    return
                for event in engine.step():
                    if event.request_id not in pending:
                        continue  # ended by a stop string while a token was on its way
                    index, answer = pending[event.request_id]
                    outcome = advance(engine, answer, event)
                    if outcome is not None:
                        del pending[event.request_id]
                        yield index, outcome
                check()
    finally:
        for name in pending:
            engine.abort(name)


def start(engine: Engine, grammars: Grammars, generation: Generation) -> JaxserveError | None:
    """Hand a sequence to the engine; what is wrong if it does not take it."""
    (request,) = generation.requests
    constraint = request.sampling.constraint
    try:
        matcher = None if constraint is None else grammars.matcher(constraint)
        refusal = engine.add(request, matcher=matcher)
    except RequestError as error:
        return error
    if refusal is None:
        return None
    return Overloaded(refusal.message, retry_after=refusal.retry_after)


def advance(
    engine: Engine, answer: Pending, event: TokenEvent
) -> Completion | JaxserveError | None:
    """Take an event; the answer if it has ended, or why it will not come."""
    try:
        if answer.push(event):
            engine.abort(event.request_id)
    except JaxserveError as error:
        return error
    return answer.completion


@contextmanager
def interrupts_between_steps() -> Iterator[Interrupts]:
    """Within the block Ctrl-C waits for the next call of what it gives; a second one does not.

    Elsewhere than in the main thread, where Python has no say about signals, it changes nothing.
    """
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupts.on_signal)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


class Interrupts:
    """Remembers a Ctrl-C. Called, it raises the KeyboardInterrupt that was put off."""

    def __init__(self) -> None:
        self._came = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True

    def __call__(self) -> None:
        if self._came:
            raise KeyboardInterrupt
