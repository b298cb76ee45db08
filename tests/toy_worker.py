"""A worker process without a model, for tests of the server: it speaks frames and fails on cue.

Its language model is an echo: at temperature 0 the output repeats the prompt and then ends with
EOS, so a test scripts any output by sending it as the prompt. At other temperatures every token is
a letter drawn from (seed, position). Prompt tokens from `FAULTS` make it misbehave when their turn
to be echoed comes.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import selectors
import socket
import sys
import time
from array import array
from dataclasses import dataclass, field

import msgspec

from jaxserve.frames import (
    LENGTH,
    Abort,
    Events,
    Failed,
    FromWorker,
    Inspect,
    Inspection,
    Progress,
    PromisedTimes,
    Ready,
    SequenceState,
    Stats,
    Submit,
    decode_to_worker,
    encode_frame,
)
from jaxserve.request import PromptLogprob, Request, TokenEvent

EOS = 256
DIE, HANG, FAIL, ERROR, SLOW, BUSY, OVERDUE, IMPOSSIBLE = range(290, 298)
VOCAB_SIZE = 300
HEARTBEAT = 0.05
NUM_PAGES = 1000
SLOW_SECONDS = 0.05


@dataclass
class Sequence:
    request: Request
    output: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output)

    @property
    def num_pages(self) -> int:
        """Of 16 tokens each."""
        return -(-self.num_tokens // 16)

    def next_token(self) -> int:
        position, sampling = len(self.output), self.request.sampling
        if sampling.temperature > 0:
            digest = hashlib.sha256(f"{sampling.seed}:{position}".encode()).digest()
            return ord("a") + int.from_bytes(digest[:8], "big") % 26
        prompt = self.request.prompt_ids
        return prompt[position] if position < len(prompt) else EOS

    def pooled(self) -> bytes:
        """The last token, or the mean of all, among numbers that are always the same."""
        prompt, pooling = self.request.prompt_ids, self.request.sampling.pooling
        first = {"last": prompt[-1], "mean": sum(prompt) / len(prompt), None: None}[pooling]
        return b"" if first is None else array("f", [first, 3, 4, 0, 0, 0, 0, 12]).tobytes()

    def event(self) -> TokenEvent:
        """The next token. Alternatives are the ids that follow it; the last is impossible."""
        sampling, scores = self.request.sampling, ()
        if sampling.prompt_logprobs is not None and not self.output:
            scores = tuple(
                PromptLogprob(
                    -token / 8, ((token, -token / 8), (7, -math.inf))[: sampling.prompt_logprobs]
                )
                for token in self.request.prompt_ids[1:]
            )
        if sampling.max_tokens == 0:
            name = self.request.request_id
            return TokenEvent(
                name, None, finish_reason="length", prompt_logprobs=scores, pooled=self.pooled()
            )
        token = self.next_token()
        self.output.append(token)
        logprob, top = None, ()
        if sampling.top_logprobs is not None:
            logprob = -0.25
            ids = [(token + i) % VOCAB_SIZE for i in range(sampling.top_logprobs)]
            top = tuple((i, -0.25 - n) for n, i in enumerate(ids[:-1]))
            top += tuple((i, -math.inf) for i in ids[-1:])
        reason = None
        if token in sampling.stop_token_ids:
            reason = "stop"
        elif len(self.output) == sampling.max_tokens:
            reason = "length"
        name = self.request.request_id
        return TokenEvent(name, token, logprob, top, reason, prompt_logprobs=scores)


class ToyWorker:
    """At most `max_rows` sequences get a token in a step; the others wait."""

    def __init__(self, connection: socket.socket, *, max_rows: int, step_seconds: float) -> None:
        self.connection = connection
        self.max_rows = max_rows
        self.step_seconds = step_seconds
        self.sequences: dict[str, Sequence] = {}
        self.received = bytearray()
        self.steps = self.output_tokens = 0

    def send(self, frame: FromWorker) -> None:
        self.connection.sendall(encode_frame(frame))

    def receive(self) -> None:
        data = self.connection.recv(1 << 20)
        if not data:
            sys.exit(0)
        self.received += data
        while len(self.received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self.received)
            if len(self.received) < LENGTH.size + length:
                return
            self.handle(decode_to_worker(self.received[LENGTH.size : LENGTH.size + length]))
            del self.received[: LENGTH.size + length]

    def handle(self, frame: Submit | Abort | Inspect) -> None:
        match frame:
            case Submit():
                for request in frame.requests:
                    self.sequences[request.request_id] = Sequence(request)
            case Abort():
                for request_id in frame.request_ids:
                    self.sequences.pop(request_id, None)
            case Inspect():
                self.send(self.inspection())

    def inspection(self) -> Inspection:
        return Inspection(
            tuple(
                SequenceState(name, "decode", sequence.num_tokens, sequence.num_pages)
                if place < self.max_rows
                else SequenceState(name, "waiting")
                for place, (name, sequence) in enumerate(self.sequences.items())
            )
        )

    def step(self) -> None:
        events = []
        for sequence in list(self.sequences.values())[: self.max_rows]:
            event = self.misbehave(sequence) or sequence.event()
            events.append(event)
            if event.finish_reason is not None:
                del self.sequences[event.request_id]
        self.steps += 1
        self.output_tokens += len(events)
        self.send(Events(tuple(events)))

    def misbehave(self, sequence: Sequence) -> TokenEvent | None:
        match sequence.next_token():
            case 290:
                os._exit(3)
            case 291:
                time.sleep(3600)
            case 292:
                self.send(Failed("out of memory: the toy asked for too much"))
                sys.exit(1)
            case 293:
                name = sequence.request.request_id
                return TokenEvent(name, None, finish_reason="error", message="the toy refuses")
            case 294:
                time.sleep(SLOW_SECONDS)
            case 295:
                return TokenEvent(
                    sequence.request.request_id,
                    None,
                    finish_reason="abort",
                    message="the toy is busy",
                    refusal="late",
                    retry_after=7.0,
                )
            case 296:
                return TokenEvent(
                    sequence.request.request_id,
                    None,
                    finish_reason="abort",
                    message="the deadline of 1 s has passed",
                    refusal="deadline",
                )
            case 297:
                return TokenEvent(
                    sequence.request.request_id,
                    None,
                    finish_reason="error",
                    message="the toy cannot follow the grammar",
                    refusal="impossible",
                )
        return None

    def stats(self) -> Stats:
        running = list(self.sequences.values())[: self.max_rows]
        return Stats(
            running=len(running),
            waiting=len(self.sequences) - len(running),
            pages_total=NUM_PAGES,
            pages_live=sum(sequence.num_pages for sequence in running),
            steps=self.steps,
            output_tokens=self.output_tokens,
            running_limit=self.max_rows,
        )

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            next_beat = 0.0
            while True:
                now = time.monotonic()
                if now >= next_beat:
                    self.send(self.stats())
                    next_beat = now + HEARTBEAT
                busy = bool(self.sequences)
                if selector.select(self.step_seconds if busy else HEARTBEAT):
                    self.receive()
                if self.sequences:
                    self.step()


def main() -> None:
    """Run until the server hangs up or a fault says otherwise."""
    try:
        serve()
    except (BrokenPipeError, ConnectionResetError, msgspec.DecodeError):
        sys.exit(0)


def serve() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--max-context", type=int, default=64)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--fail", help="send Failed with this message instead of becoming ready")
    parser.add_argument("--longest-step", type=float, default=0.0, help="what Ready says of it")
    parser.add_argument("--promise", type=float, nargs=3, metavar=("TTFT", "TPOT", "PERCENTILE"))
    parser.add_argument("--final", action="store_true", help="say that trying again is no use")
    parser.add_argument("--start-seconds", type=float, default=0.0)
    options = parser.parse_args()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(options.socket)
        worker = ToyWorker(connection, max_rows=options.max_rows, step_seconds=options.step_seconds)
        worker.send(Progress("warming up", 1, 2))
        time.sleep(options.start_seconds)
        if options.fail is not None:
            worker.send(Failed(options.fail, options.final))
            sys.exit(1)
        promise = PromisedTimes(*options.promise) if options.promise else None
        worker.send(Ready(VOCAB_SIZE, options.max_context, "a toy", options.longest_step, promise))
        worker.run()
