"""The order of prompts, held to the best of all orders; the ladder; places for those sent away."""

from __future__ import annotations

import itertools
import random

import pytest
from toy_promise import ask

from jaxserve.sla.ladder import DEPTH, FIRST, RUNGS, Ladder, MissAllowance
from jaxserve.sla.retry import GRACE, LONGEST, Places
from jaxserve.sla.turns import Prompt, take_turns


def num_on_time(order, start):
    count = 0
    for prompt in order:
        start += prompt.work
        count += start <= prompt.deadline
    return count


@pytest.mark.parametrize("seed", range(30))
def test_no_other_order_has_more_prompts_on_time(seed):
    draw = random.Random(seed)
    prompts = [Prompt(i, draw.uniform(0, 0.6), draw.uniform(0.01, 0.4)) for i in range(6)]
    turns = take_turns(prompts, 0.0, 0.5)
    best = max(num_on_time(order, 0.0) for order in itertools.permutations(prompts))
    assert num_on_time(turns.early, 0.0) == len(turns.early) == best
    assert len(turns.early) + len(turns.late) == 6


def test_without_contention_everyone_is_served_in_order_of_deadline():
    prompts = [Prompt(i, 1.0 - i / 100, 0.01) for i in range(10)]
    turns = take_turns(prompts, 0.0, 0.5)
    assert [prompt.key for prompt in turns.early] == list(range(9, -1, -1))
    assert not turns.late and not turns.beyond


def test_the_longest_steps_back_and_the_late_go_shortest_first():
    prompts = [Prompt(name, 0.5, work) for name, work in (("a", 0.4), ("b", 0.2), ("c", 0.3))]
    turns = take_turns([*prompts, Prompt("hopeless", 0.5, 2.0)], 0.0, 0.5)
    assert [prompt.key for prompt in turns.early] == ["b", "c"]
    assert [prompt.key for prompt in turns.late] == ["a", "hopeless"]


def test_a_flood_of_one_tenant_leaves_the_other_on_time():
    flood = [Prompt(("flood", i), 0.5, 0.1, "flood") for i in range(20)]
    quiet = [Prompt(("quiet", i), 0.55, 0.1, "quiet") for i in range(2)]
    turns = take_turns([*flood, *quiet], 0.0, 0.5)
    early = [prompt.key[0] for prompt in turns.early]
    assert early.count("quiet") == 2
    assert early.count("flood") == 2
    assert {prompt.tenant for prompt in turns.beyond} == {"flood"}


def test_a_prompt_larger_than_its_tenants_share_still_takes_part():
    prompts = [Prompt("a", 0.5, 0.4, "a"), Prompt("b", 0.5, 0.09, "b")]
    assert not take_turns(prompts, 0.0, 0.5).late


def test_the_ladder_is_climbed_in_order_and_left_later_than_entered():
    ladder = Ladder()
    rungs = []
    pressures = [0.0, 0.98, 0.9, 1.0, 0.95, 0.89, 0.88, 0.87]
    for pressure in pressures:
        ladder.move(pressure)
        rungs.append(ladder.rung)
    assert rungs == [0, 1, 1, 2, 2, 1, 1, 0]
    assert len(RUNGS) == 3


def test_a_server_that_has_just_started_is_calm():
    ladder = Ladder()
    ladder.move(1 - FIRST / DEPTH)
    assert ladder.rung == 0


def test_pressure_around_a_threshold_does_not_make_the_ladder_flutter():
    ladder = Ladder()
    draw = random.Random(1)
    changes, last = 0, 0
    for _ in range(1000):
        ladder.move(draw.uniform(0.92, 1.05))
        changes += ladder.rung != last
        last = ladder.rung
    assert changes <= 2


def test_the_allowance_holds_out_at_the_allowed_share_and_runs_out_beyond_it():
    for share_missed, spent in ((0.04, False), (0.08, True)):
        draw, allowance = random.Random(1), MissAllowance(0.05)
        for _ in range(3000):
            allowance.count(draw.random() < share_missed, refusing=False)
        assert (allowance.left < 0.25 * DEPTH) == spent


def test_less_of_the_allowance_is_spent_while_requests_are_refused():
    left = []
    for refusing in (False, True):
        allowance = MissAllowance(0.05)
        for _ in range(100):
            allowance.count(False, refusing=refusing)
        left.append(allowance.left)
    assert left[1] < left[0]


def test_no_second_is_promised_to_more_than_it_has_time_for():
    places = Places()
    waits = [places.reserve(ask(f"r{i}", 10), 0.0, earliest=1.5, work=0.2) for i in range(20)]
    assert waits == [2.0 + i // 2 for i in range(20)]
    assert places.reserve(ask("long", 10), 0.0, earliest=1.0, work=9.0) == 12.0, "after them all"


def test_a_place_is_taken_once_and_by_who_it_was_given_to():
    places = Places()
    request = ask("a", 10, tenant="t")
    wait = places.reserve(request, 0.0, earliest=1.0, work=0.1)
    assert not places.claim(ask("b", 10, tenant="t"), wait)
    assert not places.claim(request, wait - 1.0), "too early"
    assert places.claim(request, wait)
    assert not places.claim(request, wait)


def test_what_is_kept_free_follows_how_many_come_again():
    places = Places()
    for i in range(300):
        wait = places.reserve(ask(f"r{i}", 10), 10.0 * i, earliest=1.0, work=0.1)
        assert len(places.due(10.0 * i + wait, 0.5)) == 1
    assert places.returning < 0.05
    assert places.due(3000 + LONGEST + GRACE, 0.5) == []
