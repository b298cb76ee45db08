"""Constraints compiled beside the engine: who is let in, who is dropped, who is refused."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest
from constraint_toys import constrained, grammars
from engines import make_engine, request
from text_toys import byte_level, metaspace

from jaxserve.constraint_compiler import THREADS, Compiled, ConstraintCompiler
from jaxserve.errors import RequestError
from jaxserve.frames import Abort, Events, Submit
from jaxserve.grammar import KEPT, Grammars
from jaxserve.request import Constraint
from jaxserve.worker import Worker

GOOD, BAD = Constraint("regex", "[ab]{3}"), Constraint("regex", "(")
TIMEOUT = 20.0


def test_each_request_gets_a_matcher_of_its_own():
    done: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
    compiler = ConstraintCompiler(grammars(), done.put)
    for name in "abc":
        compiler.add(constrained(name, GOOD), came=1.0)
    results = [done.get(timeout=TIMEOUT) for _ in "abc"]
    assert {each.request.request_id for each in results} == set("abc")
    assert len({id(each.result) for each in results}) == 3
    assert all(compiler.take(name) for name in "abc")
    assert not compiler.take("a")


def test_what_was_dropped_before_its_turn_is_not_compiled():
    busy, compiled = threading.Event(), []

    def matcher(constraint):
        compiled.append(constraint)
        busy.wait(TIMEOUT)

    done: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
    compiler = ConstraintCompiler(SimpleNamespace(matcher=matcher), done.put)
    for number in range(THREADS + 3):
        compiler.add(constrained(str(number), Constraint("regex", str(number))), came=1.0)
    compiler.drop(str(number) for number in range(THREADS, THREADS + 2))
    busy.set()
    asked = {done.get(timeout=TIMEOUT).request.request_id for _ in range(THREADS + 1)}
    assert asked == {constraint.text for constraint in compiled}
    assert asked == {"0", "1", str(THREADS + 2)} and done.empty()


class Link:
    """The worker's side of the socket, without one."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.sent: list = []

    def send(self, frame) -> None:
        self.sent.append(frame)


def make_worker() -> tuple[Worker, Link]:
    link = Link()
    engine = make_engine("llama-untied")
    return Worker(engine, grammars(), link, SimpleNamespace(count=0)), link


def run(worker: Worker, link: Link, count: int) -> list:
    """Take so many compiled constraints, then run to the end. Every event."""
    for _ in range(count):
        worker._act(*link.inbox.get(timeout=TIMEOUT))
    link.inbox.put(None)
    engine = worker._engine
    while engine.has_work:
        if events := engine.step():
            link.send(Events(tuple(events)))
    return [event for frame in link.sent for event in frame.events]


def test_a_worker_serves_free_and_constrained_requests_and_refuses_what_is_no_good():
    worker, link = make_worker()
    asked = (constrained("good", GOOD), request("free", [1, 2], 3), constrained("bad", BAD))
    worker._act(Submit(asked), 0.0)
    events = run(worker, link, 2)
    (refused,) = [event for event in events if event.request_id == "bad"]
    assert (refused.token_id, refused.refusal) == (None, "impossible")
    assert "the regular expression cannot be used" in refused.message
    ends = {e.request_id: e.finish_reason for e in events if e.finish_reason is not None}
    assert ends == {"good": "stop", "free": "length", "bad": "error"}


def test_a_request_dropped_once_it_is_compiled_leaves_nothing_behind():
    worker, link = make_worker()
    worker._act(Submit((constrained("left", GOOD), constrained("stays", GOOD))), 0.0)
    compiled = [link.inbox.get(timeout=TIMEOUT) for _ in range(2)]
    worker._act(Abort(("left", "unknown")), 0.0)
    for each in compiled:
        worker._act(*each)
    events = run(worker, link, 0)
    assert {event.request_id for event in events} == {"stays"}
    assert worker._engine.scheduler.pool.num_live == 0


def test_a_fault_of_the_compiler_is_an_answer_too():
    class Broken:
        def matcher(self, constraint):
            raise MemoryError

    done: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
    ConstraintCompiler(Broken(), done.put).add(constrained("a", GOOD), came=1.0)
    result = done.get(timeout=TIMEOUT).result
    assert isinstance(result, RequestError) and "compiling it failed" in str(result)


@pytest.mark.parametrize(
    "made, words",
    [
        (Grammars(None, vocab_size=320, eos_ids=(1,)), "no tokenizer"),
        (Grammars(byte_level().to_str(), vocab_size=320, eos_ids=()), "no end token"),
        (Grammars(byte_level().to_str(), vocab_size=100, eos_ids=(1,)), "not supported"),
        (Grammars(metaspace().to_str(), vocab_size=320, eos_ids=(1,)), "not supported"),
    ],
)
def test_a_model_whose_tokenizer_will_not_do_says_so(made, words):
    for _ in range(2):
        with pytest.raises(RequestError, match=words):
            made.matcher(GOOD)


def test_only_so_many_compiled_constraints_are_kept():
    made = Grammars(byte_level().to_str(), vocab_size=320, eos_ids=(275,))
    often = Constraint("regex", "often")
    for i in range(KEPT + 5):
        made.matcher(Constraint("regex", f"a{{{i + 1}}}"))
        made.matcher(often)
    assert len(made._compiled) == KEPT
    assert often in made._compiled  # whoever was not asked for makes room
