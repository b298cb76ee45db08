"""Answers held to a schema or a grammar: every one keeps to it, and neighbours notice nothing."""

from __future__ import annotations

import json
import re

import jax
import jsonschema
import pytest
from constraint_toys import (
    EOS_ID,
    PERSON,
    SECOND_EOS_ID,
    add,
    constrained,
    grammars,
    schema,
    text,
)
from crowd import MODELS, Events, assert_same, both_loops, drain, make_requests, serve, tokens
from engines import make_engine

from jaxserve.engine import Engine
from jaxserve.errors import RequestError
from jaxserve.request import Constraint, Request

NAME = MODELS[0]
REGEX = Constraint("regex", r"[a-c]{2,5}-[0-9]{3}(x|yz)?")
CHOICES = ("yes", "no, never", "東京 🫖")
CHOICE = Constraint("lark", "start: " + " | ".join(map(json.dumps, CHOICES)))


def run(engine: Engine, *requests: Request) -> Events:
    add(engine, *requests)
    return drain(engine)


def people(count: int, **fields: object) -> list[Request]:
    person = schema(PERSON, "[ ]")
    return [constrained(f"p{i}", person, seed=i, **fields) for i in range(count)]


def assert_people(events: Events, names: list[str]) -> None:
    for name in names:
        assert events[name][-1].finish_reason == "stop", name
        *ids, end = tokens(events[name])
        assert end in (EOS_ID, SECOND_EOS_ID)
        jsonschema.validate(json.loads(text(ids)), PERSON)


# The oracle.


@both_loops
def test_every_sampled_answer_parses_and_satisfies_its_schema(look_ahead):
    events = run(make_engine(NAME, look_ahead=look_ahead), *people(24))
    assert_people(events, list(events))
    assert len({text(tokens(each)) for each in events.values()}) == 24


def test_every_sampled_answer_matches_its_expression_whole():
    ask = [constrained(f"{i}", REGEX, seed=i) for i in range(24)]
    for each in run(make_engine(NAME), *ask).values():
        assert each[-1].finish_reason == "stop"
        assert re.fullmatch(REGEX.text, text(tokens(each)[:-1]))


def test_every_choice_is_one_of_those_given_and_each_of_them_comes():
    ask = [constrained(f"{i}", CHOICE, seed=i) for i in range(60)]
    got = {text(tokens(each)[:-1]) for each in run(make_engine(NAME), *ask).values()}
    assert got == set(CHOICES)


def test_whitespace_is_what_was_asked_for():
    small = {"type": "array", "items": {"type": "null"}, "minItems": 4, "maxItems": 4}
    compact = "[null,null,null,null]"
    for space, put in {"": "", "[ ]{3}": " " * 3, "\n|[\t]{9}": "\n", None: None}.items():
        events = run(make_engine(NAME), constrained("x", schema(small, space)))["x"]
        found = text(tokens(events)[:-1])
        assert "".join(found.split()) == compact
        if put is not None:
            assert set(re.findall(r"\s+", found)) <= {put, "\t" * 9 if "\n" in put else put}


def test_an_answer_is_cut_at_max_tokens_and_is_the_beginning_of_what_it_would_be():
    whole = run(make_engine(NAME), *people(1))["p0"]
    cut = run(make_engine(NAME), *people(1, max_tokens=9))["p0"]
    assert cut[-1].finish_reason == "length"
    assert tokens(cut) == tokens(whole)[:9]


def test_log_probabilities_are_those_of_the_model_without_the_constraint():
    (events,) = run(make_engine(NAME), *people(1, top_logprobs=3)).values()
    assert any(e.logprob < e.top_logprobs[-1][1] for e in events)  # banned tokens are likelier


# Whatever else is going on.


def beside(engine: Engine) -> Events:
    """People and a crowd of free requests together."""
    return run(engine, *people(3), *make_requests(), *people(6)[3:])


@both_loops
def test_neighbours_get_the_tokens_they_would_have_got(look_ahead):
    free = serve(make_engine(NAME, look_ahead=look_ahead), make_requests())
    events = beside(make_engine(NAME, look_ahead=look_ahead))
    assert_same({key: events[key] for key in free}, free)
    assert_people(events, [f"p{i}" for i in range(6)])


ENGINES = {
    "in turn": {"look_ahead": False},
    "small chunks": {"token_budget": 9},
    "recomputed": {"usable_pages": 40},
    "swapped": {"usable_pages": 40, "swap_pages": 60},
    "no sharing": {"prefix_reuse": False},
}


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)
def test_a_constrained_answer_is_the_same_whatever_the_engine_does(settings):
    alone: Events = {}
    for each in people(6):
        alone |= run(make_engine(NAME), each)
    engine = make_engine(NAME, **settings)
    events = beside(engine)
    for name, expected in alone.items():
        assert tokens(events[name]) == tokens(expected)
    assert (engine.scheduler.num_preemptions > 0) == ("usable_pages" in settings)
    assert (engine.scheduler.swap.num_swaps > 0) == ("swap_pages" in settings)


def test_what_else_a_request_asks_of_its_tokens_holds_within_its_grammar():
    letters = Constraint("regex", "[ab]{20}")
    a, b = grammar_ids("a"), grammar_ids("b")
    rules = {
        "logit_bias": (((a, 100.0),), lambda t: t == "a" * 20),
        "bad_words": (((a, a), (b, b)), lambda t: t in ("ab" * 10, "ba" * 10)),
    }
    for name, (value, holds) in rules.items():
        (events,) = run(make_engine(NAME), constrained("x", letters, **{name: value})).values()
        assert holds(text(tokens(events)[:-1])), name


def grammar_ids(letter: str) -> int:
    (token,) = [i for i in range(256) if text([i]) == letter]
    return token


@both_loops
@pytest.mark.parametrize(
    "rules", [{"bad_words": ((grammar_ids("c"),),)}, {"min_tokens": 9}], ids=["bans", "no end yet"]
)
def test_a_request_that_leaves_nothing_to_draw_ends_alone_and_says_why(rules, look_ahead):
    engine = make_engine(NAME, look_ahead=look_ahead)
    dead_end = constrained("dead end", Constraint("regex", "abc"), **rules)
    events = run(engine, people(1)[0], dead_end, people(2)[1])
    last = events["dead end"][-1]
    assert (last.token_id, last.refusal) == (None, "impossible")
    assert "leaves no token to draw" in last.message
    assert_people(events, ["p0", "p1"])


@both_loops
def test_a_matcher_that_fails_amid_an_answer_ends_that_answer_alone(look_ahead):
    engine = make_engine(NAME, look_ahead=look_ahead)
    add(engine, *people(3))
    for _ in range(4):
        engine.step()
    broken = engine.scheduler.running[1].matcher
    assert broken is not None and not broken.consume_token(EOS_ID)
    events = drain(engine)
    last = events["p1"][-1]
    assert (last.token_id, last.refusal) == (None, "impossible")
    assert "cannot be held to its schema" in last.message
    assert [events[name][-1].finish_reason for name in ("p0", "p2")] == ["stop", "stop"]


def test_steps_with_constraints_compile_nothing():
    engine = make_engine(NAME)
    run(engine, *make_requests())
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event)
    )
    run(engine, *people(2), *make_requests())
    assert not [event for event in compiled if "backend_compile" in event]


def test_a_constraint_without_its_matcher_never_reaches_the_device():
    (ask,) = people(1)
    with pytest.raises(ValueError, match="go together"):
        make_engine(NAME).add(ask)


def test_a_matcher_is_let_go_with_its_sequence():
    engine = make_engine(NAME)
    add(engine, *people(4))
    for _ in range(4):
        engine.step()
    sequences = list(engine.scheduler.running)
    assert all(sequence.matcher is not None for sequence in sequences)
    engine.abort("p1")
    assert [s.matcher is None for s in sequences] == [False, True, False, False]
    drain(engine)
    assert all(sequence.matcher is None for sequence in sequences)


# Refusals.


def doubling(depth: int) -> str:
    """Rules that make text of so many doublings."""
    return "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(1, depth))


NEVER = Constraint("lark", "start: /[a&&b]/")
BAD = {
    "no JSON": Constraint("json_schema", "{"),
    "no schema": Constraint("json_schema", "3"),
    "a type there is not": schema({"type": "integral"}),
    "a keyword not supported": schema({"type": "array", "uniqueItems": True}),
    "a reference that leads nowhere": schema({"$ref": "#/$defs/x"}),
    "a reference to elsewhere": schema({"$ref": "http://127.0.0.1:9/x"}),
    "a reference to itself": schema({"$ref": "#"}),
    "satisfied by nothing": schema({"type": "integer", "minimum": 5, "maximum": 3}),
    "an unclosed group": Constraint("regex", "(a"),
    "look-ahead": Constraint("regex", "(?=a)b"),
    "too large for a step": Constraint("lark", "start: r1\n" + doubling(50) + 'r50: "a"\n'),
    "nested too deeply": Constraint("regex", "(" * 5000 + "a" + ")" * 5000),
    "too deep JSON": Constraint("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "too many properties": schema({"properties": {f"p{i}": {} for i in range(20000)}}),
    "no rule": Constraint("lark", "start"),
    "an empty grammar": Constraint("lark", ""),
    "rules that never end": Constraint("lark", "start: start"),
    "too much work for a token": Constraint("regex", "(a{1000}){100}"),
    "too large an expression": Constraint("regex", "(a{1000}){1000}"),
    "a deep grammar": Constraint("lark", "start: " + "(" * 20000 + '"a"' + ")" * 20000),
    "no GBNF": Constraint("lark", "root ::= ("),
    "whitespace that is no expression": schema(PERSON, "("),
}


@pytest.mark.parametrize("constraint", BAD.values(), ids=BAD)
def test_a_constraint_that_is_no_good_is_refused_in_words(constraint):
    with pytest.raises(RequestError, match=r"^the (schema|regular expression|grammar) cannot be"):
        grammars().matcher(constraint)


@pytest.mark.parametrize(
    "constraint", [schema({"$ref": "#"}), Constraint("lark", "start: start"), NEVER]
)
def test_a_constraint_that_nothing_satisfies_is_refused_for_that(constraint):
    with pytest.raises(RequestError, match="nothing satisfies it"):
        grammars().matcher(constraint)


def test_a_grammar_in_either_notation_is_understood():
    for grammar in ('start: "a" B\nB: /[0-9]/', 'root ::= "a" b\nb ::= [0-9]'):
        (events,) = run(make_engine(NAME), constrained("x", Constraint("lark", grammar))).values()
        assert re.fullmatch("a[0-9]", text(tokens(events)[:-1]))
