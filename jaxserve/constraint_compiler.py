"""Compiles constraints beside the engine, so that nobody waits for another's schema."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher

from jaxserve.errors import RequestError
from jaxserve.grammar import Grammars
from jaxserve.request import Request

logger = logging.getLogger("jaxserve.worker")

THREADS = 2


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request whose constraint has been looked at.

    Attributes:
        request: it. came: when it came, in seconds of `time.monotonic`.
        result: a matcher of its own, or why there is none.
    """

    request: Request
    came: float
    result: LLMatcher | RequestError


class ConstraintCompiler:
    """Requests in, from one thread; `Compiled` out, from others."""

    def __init__(self, grammars: Grammars, done: Callable[[Compiled], None]) -> None:
        """`done` is called with each request that is not dropped, by the thread that compiled."""
        self._grammars = grammars
        self._done = done
        self._threads = ThreadPoolExecutor(THREADS, "grammar")
        self._wanted: set[str] = set()

    def add(self, request: Request, came: float) -> None:
        """Compile its constraint."""
        self._wanted.add(request.request_id)
        self._threads.submit(self._compile, request, came)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these any more. Unknown ids are fine."""
        self._wanted.difference_update(request_ids)

    def take(self, request_id: str) -> bool:
        """Whether somebody still waits for it. Ask once it is `done`, and only once."""
        wanted = request_id in self._wanted
        self._wanted.discard(request_id)
        return wanted

    def _compile(self, request: Request, came: float) -> None:
        if request.request_id not in self._wanted:
            return  # whoever sends and leaves keeps no thread from the others
        constraint = request.sampling.constraint
        assert constraint is not None
        result: LLMatcher | RequestError
        try:
            result = self._grammars.matcher(constraint)
        except RequestError as error:
            result = error
        except Exception:  # a fault of the library's: whoever asked still gets an answer
            logger.exception("a %s could not be compiled", constraint.kind)
            result = RequestError("the constraint cannot be used: compiling it failed")
        self._done(Compiled(request, came, result))
