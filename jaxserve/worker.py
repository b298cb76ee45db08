"""The engine process: frames in, an engine, frames out. Started by the server's supervisor.

    python -m jaxserve.worker --config JSON --socket PATH

One thread reads the socket into a queue; the main thread runs the engine and writes. A failed
step is fatal on purpose: the donated device state is gone, and the supervisor starts afresh.
"""

from __future__ import annotations

import argparse
import gc
import logging
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable

import jax
from llguidance import LLMatcher

from checkpoints import CheckpointError
from jaxserve.config import EngineConfig, decode_engine_config
from jaxserve.constraint_compiler import Compiled, ConstraintCompiler
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError, JaxserveError, RequestError
from jaxserve.frames import (
    LENGTH,
    Abort,
    Events,
    Failed,
    FromWorker,
    Inspect,
    Progress,
    PromisedTimes,
    Ready,
    Stats,
    Submit,
    ToWorker,
    decode_to_worker,
    encode_frame,
)
from jaxserve.grammar import Grammars
from jaxserve.inspection import inspect
from jaxserve.priority import put_computing_threads_last
from jaxserve.request import Request, TokenEvent
from jaxserve.results import impossible
from jaxserve.startup import load_engine

logger = logging.getLogger("jaxserve.worker")

HEARTBEAT = 0.5
"""Seconds between Stats frames."""
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Link:
    """The worker's end of the socket. `send` may be called from any thread."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._sending = threading.Lock()
        self.inbox: queue.SimpleQueue[tuple[ToWorker | Compiled, float] | None]
        self.inbox = queue.SimpleQueue()
        threading.Thread(target=self._read, name="frames", daemon=True).start()

    def send(self, frame: FromWorker) -> None:
        data = encode_frame(frame)
        with self._sending:
            self._socket.sendall(data)

    def _read(self) -> None:
        """Queue every frame with the time it came; None once the server is gone."""
        try:
            with self._socket.makefile("rb") as stream:
                while header := stream.read(LENGTH.size):
                    (length,) = LENGTH.unpack(header)
                    frame = decode_to_worker(stream.read(length))
                    self.inbox.put((frame, time.monotonic()))
        except (OSError, ValueError) as error:
            logger.error("the server's frames broke off: %s", error)
        finally:
            self.inbox.put(None)


class CompilationCounter:
    """Counts what XLA compiles from `start` on. Serving must never make it move."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = False
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def start(self) -> None:
        self._counting = True

    def _on_event(self, event: str, duration_secs: float, **details: str | int) -> None:
        if self._counting and event == COMPILE_EVENT:
            self.count += 1
            logger.error(
                "compiled for %.1f s while serving: a step shape was missed", duration_secs
            )


class Worker:
    """Serves one engine over one link, until the link closes."""

    def __init__(
        self, engine: Engine, grammars: Grammars, link: Link, compilations: CompilationCounter
    ) -> None:
        self._engine = engine
        self._compiler = ConstraintCompiler(
            grammars, lambda compiled: link.inbox.put((compiled, compiled.came))
        )
        self._link = link
        self._compilations = compilations
        self._next_stats = 0.0

    def run(self) -> None:
        """Step while there is work; sleep on the inbox while there is none, or time to spare."""
        while self._take_frames():
            events = self._engine.step(self._act_on_next) if self._engine.has_work else []
            if events:
                self._link.send(Events(tuple(events)))
            if time.monotonic() >= self._next_stats:
                self._next_stats = time.monotonic() + HEARTBEAT
                self._link.send(self._stats())

    def _take_frames(self) -> bool:
        """Act on every frame that has come. False when the server is gone."""
        while True:
            busy = self._engine.has_work
            wait = self._engine.spare_seconds if busy else HEARTBEAT
            try:
                frame = self._link.inbox.get(block=wait > 0, timeout=wait)
            except queue.Empty:
                if busy and wait:
                    continue
                return True
            if frame is None:
                return False
            self._act(*frame)

    def _act_on_next(self, patience: float) -> None:
        """Act on the next frame, if one comes within so many seconds."""
        try:
            frame = self._link.inbox.get(timeout=patience)
        except queue.Empty:
            return
        if frame is None:
            self._link.inbox.put(None)  # the end: `_take_frames` is to find it
            time.sleep(patience)
            return
        self._act(*frame)

    def _act(self, frame: ToWorker | Compiled, came: float) -> None:
        match frame:
            case Submit(requests):
                for request in requests:
                    if request.sampling.constraint is not None:
                        self._compiler.add(request, came)
                free = [request for request in requests if request.sampling.constraint is None]
                self._refuse(self._add(request, came) for request in free)
            case Compiled(request, _, result):
                if not self._compiler.take(request.request_id):
                    return
                if isinstance(result, RequestError):
                    self._refuse([impossible(request, str(result))])
                else:
                    self._refuse([self._add(request, came, result)])
            case Abort(request_ids):
                self._compiler.drop(request_ids)
                for request_id in request_ids:
                    self._engine.abort(request_id)
            case Inspect():
                scheduler = self._engine.scheduler
                self._link.send(inspect(scheduler.running, scheduler.waiting))

    def _refuse(self, events: Iterable[TokenEvent | None]) -> None:
        refusals = tuple(event for event in events if event is not None)
        if refusals:
            self._link.send(Events(refusals))

    def _add(
        self, request: Request, came: float, matcher: LLMatcher | None = None
    ) -> TokenEvent | None:
        """Queue a request. Its only event if it is not let in."""
        try:
            refusal = self._engine.add(request, arrived=came, matcher=matcher)
        except RequestError as error:
            return TokenEvent(request.request_id, None, finish_reason="error", message=str(error))
        if refusal is None:
            return None
        return TokenEvent(
            request.request_id,
            None,
            finish_reason="abort",
            message=refusal.message,
            refusal=refusal.reason,
            retry_after=refusal.retry_after,
        )

    def _stats(self) -> Stats:
        scheduler, counters = self._engine.scheduler, self._engine.counters
        report = scheduler.policy.report()
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_total=scheduler.pool.num_total,
            pages_live=scheduler.pool.num_live,
            pages_cached=scheduler.pool.num_cached,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            preemptions=scheduler.num_preemptions,
            swaps=scheduler.swap.num_swaps,
            asked_tokens=counters.asked_tokens,
            found_tokens=counters.found_tokens,
            rows=counters.rows,
            compilations=self._compilations.count,
            step_seconds=counters.step_seconds,
            predicted_seconds=report.predicted_seconds,
            prediction_error=report.prediction_error,
            step_factors=dict(report.step_factors),
            step_tokens=counters.step_tokens,
            token_budget=scheduler.token_budget,
            gap_seconds=counters.gap_seconds,
            running_limit=report.running_limit,
            rung=report.rung,
        )


def serve(config: EngineConfig, link: Link) -> None:
    """Load, say ready, run."""
    loaded = load_engine(
        config, progress=lambda message, done, total: link.send(Progress(message, done, total))
    )
    if jax.default_backend() == "cpu":
        put_computing_threads_last()
    gc.freeze()  # what was loaded stays: looking through it would hold a step up, again and again
    compilations = CompilationCounter()
    compilations.start()
    promise = loaded.promise
    link.send(
        Ready(
            loaded.vocab_size,
            loaded.engine.scheduler.max_context,
            loaded.description,
            loaded.longest_step,
            None
            if promise is None
            else PromisedTimes(promise.ttft, promise.tpot, promise.percentile),
        )
    )
    Worker(loaded.engine, loaded.grammars, link, compilations).run()


def main(argv: list[str] | None = None) -> int:
    """Run a worker. Returns the exit code: 0 if the server went away, 1 if the worker failed."""
    parser = argparse.ArgumentParser(prog="python -m jaxserve.worker")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--socket", required=True, help="unix socket the server listens on")
    flags = parser.parse_args(argv)
    # Ctrl-C in a terminal reaches the whole process group; when to stop is the server's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    link = Link(flags.socket)
    try:
        serve(decode_engine_config(flags.config), link)
    except (CheckpointError, ConfigError) as error:
        return _fail(link, str(error), final=True)
    except BrokenPipeError:
        return 0  # the server is gone
    except Exception as error:
        traceback.print_exc()
        kind = "" if isinstance(error, JaxserveError) else f"{type(error).__name__}: "
        return _fail(link, f"{kind}{error}")
    finally:
        # It ends by itself: what cleans up on the way out is not to be broken off.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0


def _fail(link: Link, message: str, *, final: bool = False) -> int:
    try:
        link.send(Failed(message, final))
    except OSError:
        logger.error("%s", message)
    return 1


if __name__ == "__main__":
    sys.exit(main())
