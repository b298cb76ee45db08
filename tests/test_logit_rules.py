"""Rules on logits: by their definitions in numpy, and the same whatever else is being served."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from crowd import MODELS, SAMPLING, Events, prompts, serve, tokens
from engines import all_logits, make_engine, request, tiny
from test_engine import SERVING

from jaxserve.batch import MAX_COUNT, DeviceState, StepShape
from jaxserve.logit_rules import apply_rules, count_fed
from jaxserve.packing import pack
from jaxserve.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LISTED_TOKENS,
    MAX_WAITING_STOPS,
    Request,
    SamplingParams,
)
from jaxserve.rule_writer import RuleWriter, empty_rules
from jaxserve.sequence import Sequence, Span

VOCAB = 300
SLOTS = 8
SHAPE = StepShape(num_tokens=64, num_rows=SLOTS, max_pages=64, page_size=16)
NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}

PENALTIES = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -1.0, "presence_penalty": -0.5},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
]


def penalised(logits: np.ndarray, prompt: list[int], output: list[int], **given) -> np.ndarray:
    """One row's logits by the definitions: OpenAI's for what was drawn, CTRL's for every token."""
    fields = NEUTRAL | given
    logits = logits.astype(np.float64)
    for token in {*prompt, *output}:
        factor = fields["repetition_penalty"]
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= fields["presence_penalty"]
        logits[token] -= fields["frequency_penalty"] * output.count(token)
    return logits


def allowed_by(logits: np.ndarray, prompt: list[int], output: list[int], **given) -> np.ndarray:
    """One row's logits by the definitions of bans and biases; then penalties."""
    logits = logits.astype(np.float64)
    for token, bias in given.get("logit_bias", ()):
        logits[token] += bias
    allowed = given.get("allowed_token_ids")
    if allowed is not None:
        logits[[token for token in range(len(logits)) if token not in allowed]] = -np.inf
    for *begin, last in given.get("bad_words", ()):
        if not begin or output[-len(begin) :] == begin:
            logits[last] = -np.inf
    if len(output) < given.get("min_tokens", 0):
        logits[list(given["stop_token_ids"])] = -np.inf
    return penalised(logits, prompt, output, **{k: v for k, v in given.items() if k in NEUTRAL})


def sequence(slot: int, prompt: list[int], output: list[int], **sampling) -> Sequence:
    params = SamplingParams(max_tokens=99, **sampling)
    own = Request(f"slot {slot}", tuple(prompt), params)
    return Sequence(own, array("i", [*prompt, *output]), array("i", [1]), slot=slot)


def drawing(sequence: Sequence, *, feed: bool = False) -> Span:
    """The span of the newest token; with `feed` the host has not seen it."""
    stop = len(sequence.tokens) + feed
    return Span(sequence, stop - 1, stop, feed, draws=True)


LISTS = [
    {"logit_bias": ((3, 50.0), (17, -4.0), (299, 0.25))},
    {"logit_bias": tuple((token, token / 10) for token in range(200))},
    {"allowed_token_ids": (0, 5, 7, 299)},
    {"allowed_token_ids": tuple(range(40)), "logit_bias": ((5, 2.0), (250, 9.0))},
    {"bad_words": ((4,), (1, 2), (0, 1, 2, 3), (2, 2))},
    {"bad_words": tuple((a, b) for a in range(4) for b in range(4) if a != b)},
    {"min_tokens": 6, "stop_token_ids": (0, 2, 299)},
    {
        "min_tokens": 3,
        "stop_token_ids": (1,),
        "allowed_token_ids": (0, 1, 2, 3),
        "logit_bias": ((1, 3.0),),
        "bad_words": ((0,), (2, 3)),
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
    },
]


class Device:
    """The part of the device state that rules are about, step after step."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.state = DeviceState((), np.zeros(SLOTS, np.int32), empty_rules(SLOTS, vocab_size))
        self.writer = RuleWriter(self.state)
        self.run = jax.jit(self._run, donate_argnums=1)

    def step(self, spans: list[Span], logits: np.ndarray) -> np.ndarray:
        """What the rows' tokens are drawn from."""
        state = self.writer.write(self.state, spans)
        batch = pack(spans, SHAPE)[0]
        ruled, rules = self.run(logits, state.rules, state.last_token, batch)
        self.state = DeviceState((), state.last_token, rules)
        return np.asarray(ruled)[: len(spans)]

    @staticmethod
    def _run(logits, rules, last_token, batch):
        rules = count_fed(rules, last_token, batch)
        ruled = apply_rules(logits, rules, batch.kv_len, batch.slot, batch.sampling)
        return ruled, rules


def random_logits(seed: int) -> np.ndarray:
    return 3 * np.random.default_rng(seed).standard_normal((SLOTS, VOCAB), np.float32)


# By definition.


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rules", [PENALTIES, LISTS], ids=["penalties", "lists"])
def test_rules_are_their_definitions_over_random_histories(rules, seed):
    """Eight rows, some without rules, whose tokens the host does and does not know by turns."""
    rng = np.random.default_rng(seed)
    device = Device()
    few = 40 if rules is PENALTIES else 5  # tokens, so that bad words do begin
    settings = [rules[i % len(rules)] if i % 8 != 7 else {} for i in rng.permutation(SLOTS)]
    rows = [
        sequence(
            slot,
            rng.integers(0, few, rng.integers(1, 30)).tolist(),
            rng.integers(0, few, rng.integers(0, 30) if slot % 2 else 0).tolist(),
            **settings[slot],
        )
        for slot in range(SLOTS)
    ]
    newest = np.zeros(SLOTS, np.int32)
    for step in range(9):
        fed = step % 4 != 0  # the others find that the host knows all
        logits = random_logits(10 * seed + step)
        order = rng.permutation(SLOTS).tolist()
        device.state.last_token[:] = newest
        got = device.step([drawing(rows[slot], feed=fed) for slot in order], logits)
        if fed:
            for row in rows:
                row.tokens.append(newest[row.slot])
        for place, slot in enumerate(order):
            prompt = list(rows[slot].request.prompt_ids)
            output = rows[slot].tokens.tolist()[len(prompt) :]
            expected = allowed_by(logits[place], prompt, output, **settings[slot])
            np.testing.assert_allclose(got[place], expected, rtol=1e-5, atol=1e-5)
        newest = rng.integers(0, few, SLOTS).astype(np.int32)
        if step % 4 == 3:
            for row in rows:
                row.tokens.append(newest[row.slot])


def test_rows_without_rules_keep_their_logits_bit_for_bit():
    device = Device()
    rows = [sequence(slot, [1], [2], **(LISTS[-1] if slot % 2 else {})) for slot in range(SLOTS)]
    logits = random_logits(2)
    got = device.step([drawing(row) for row in rows], logits)
    np.testing.assert_array_equal(got[::2], logits[::2])
    assert (got[1::2] != logits[1::2]).any(axis=-1).all()


def test_every_list_has_room_for_as_much_as_may_be_asked():
    vocab = 4096
    device = Device(vocab)
    full = {
        "logit_bias": tuple((token, 1.0) for token in range(MAX_LISTED_TOKENS)),
        "bad_words": tuple((2000 + word,) for word in range(MAX_BAD_WORDS)),
        "min_tokens": 5,
        "stop_token_ids": tuple(range(3000, 3000 + MAX_WAITING_STOPS)),
    }
    long = {"bad_words": (tuple(range(MAX_BAD_WORD_TOKENS)),) * MAX_BAD_WORDS}
    logits = np.zeros((SLOTS, vocab), np.float32)
    rows = [
        sequence(0, [1], [], **full),
        sequence(1, [1], list(range(MAX_BAD_WORD_TOKENS - 1)), **long),
    ]
    got = device.step([drawing(row) for row in rows], logits)
    np.testing.assert_array_equal(got[0, :MAX_LISTED_TOKENS], 1.0)
    banned = [*range(2000, 2000 + MAX_BAD_WORDS), *range(3000, 3000 + MAX_WAITING_STOPS)]
    assert np.flatnonzero(np.isneginf(got[0])).tolist() == banned
    assert np.flatnonzero(np.isneginf(got[1])).tolist() == [MAX_BAD_WORD_TOKENS - 1]


def test_a_slot_keeps_nothing_of_who_had_it_before():
    device = Device()
    device.step([drawing(sequence(3, [1, 2, 3], [4, 4], presence_penalty=2.0))], random_logits(0))
    logits = random_logits(1)
    got = device.step([drawing(sequence(3, [5], [6], frequency_penalty=1.0))], logits)
    expected = penalised(logits[0], [5], [6], frequency_penalty=1.0)
    np.testing.assert_allclose(got[0], expected, rtol=1e-6)


def test_counts_stop_before_they_overflow():
    device = Device()
    row = sequence(0, [7], [9] * (MAX_COUNT + 50), frequency_penalty=2.0)
    device.state.last_token[0] = 9
    device.step([drawing(row)], random_logits(0))
    for _ in range(3):
        logits = random_logits(1)
        got = device.step([drawing(row, feed=True)], logits)
        assert got[0, 9] == pytest.approx(logits[0, 9] - 2.0 * MAX_COUNT)
        assert got[0, 7] == logits[0, 7]


def test_a_row_that_is_not_finite_stays_so():
    device = Device()
    logits = random_logits(0)
    logits[0, 5] = np.nan
    got = device.step([drawing(sequence(0, [5], [5], **PENALTIES[-1]))], logits)
    assert np.isnan(got[0, 5]) and np.isfinite(np.delete(got[0], 5)).all()


# In the engine.


def make_ruled(rules: list[dict], max_tokens: int = 20) -> list[Request]:
    """A crowd of rows with rules of every kind, greedy and drawn, and some without any."""
    made = []
    for i, prompt in enumerate([*prompts(1), *prompts(2)]):
        hot = {**SAMPLING, "seed": 2**40 + i} if i % 2 else {}
        ruled = {} if i % 5 == 4 else rules[i % len(rules)]
        made.append(request(str(i), prompt, max_tokens, top_logprobs=1, **hot, **ruled))
    return made


def alone(name: str, requests: list[Request]) -> Events:
    events: Events = {}
    for each in requests:
        events |= serve(make_engine(name, look_ahead=False), [each])
    return events


def test_greedy_tokens_are_the_best_of_the_penalised_logits():
    name = MODELS[0]
    settings = {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.4}
    made = [request(str(i), p, 24, top_logprobs=0, **settings) for i, p in enumerate(prompts(1))]
    got = serve(make_engine(name), made)
    plain = serve(
        make_engine(name), [request(each.request_id, each.prompt_ids, 24) for each in made]
    )
    certain = 0
    for each in made:
        prompt, output = list(each.prompt_ids), tokens(got[each.request_id])
        assert output != tokens(plain[each.request_id])
        logits = all_logits(tiny(name), [*prompt, *output])[len(prompt) - 1 : -1]
        for i, row in enumerate(logits):
            ruled = penalised(row, prompt, output[:i], **settings)
            best = np.sort(ruled)
            if best[-1] - best[-2] > 1e-3:
                certain += 1
                assert output[i] == np.argmax(ruled)
            raw = np.asarray(jax.nn.log_softmax(row))[output[i]]
            assert got[each.request_id][i].logprob == pytest.approx(raw, abs=1e-4)
    assert certain > 150


ENGINE_RULES = [
    *PENALTIES,
    {"logit_bias": ((5, 3.0), (6, 3.0), (7, -100.0))},
    {"allowed_token_ids": tuple(range(0, 320, 5)), "frequency_penalty": 1.0},
    {"bad_words": tuple((token,) for token in range(100)), "presence_penalty": 1.0},
    {"min_tokens": 9, "stop_token_ids": tuple(range(60))},
]
HOW = {name: SERVING[name] for name in SERVING if "host amid" not in name}


@pytest.fixture(scope="module")
def ruled_alone() -> Events:
    return alone(MODELS[0], make_ruled(ENGINE_RULES))


@pytest.mark.parametrize(("how", "drive"), HOW.values(), ids=HOW)
def test_rules_are_the_same_however_a_row_is_served(ruled_alone, how, drive: Callable[..., Events]):
    engine = make_engine(MODELS[0], **how)
    got = drive(engine, make_ruled(ENGINE_RULES))
    assert {key: tokens(events) for key, events in got.items()} == {
        key: tokens(events) for key, events in ruled_alone.items()
    }
    assert (engine.scheduler.num_preemptions > 0) == ("usable_pages" in how)


def test_the_same_prompt_again_is_found_and_its_tokens_still_count():
    """The first request computes the prompt; the others read its pages, not its tokens."""
    prompt = prompts(3)[7]
    engine = make_engine(MODELS[0])
    settings = {"repetition_penalty": 1.8}
    first = serve(engine, [request("0", prompt, 12, **settings)])
    again = serve(engine, [request(str(i), prompt, 12, **settings) for i in range(1, 5)])
    assert all(events[0].num_cached >= 112 for events in again.values())
    assert {tuple(tokens(events)) for events in again.values()} == {tuple(tokens(first["0"]))}


def test_no_stop_comes_before_min_tokens_and_one_after_them_ends_the_answer():
    stops = tuple(range(0, 320, 2))
    made = [
        request(f"{i} {least}", prompt, 20, min_tokens=least, stop_token_ids=stops, **hot)
        for i, prompt in enumerate(prompts(1))
        for least in (0, 1, 7, 20)
        for hot in ({} if i % 2 else {"temperature": 1.0, "seed": i},)
    ]
    lengths = set()
    for key, events in serve(make_engine(MODELS[0]), made).items():
        output, least = tokens(events), int(key.split()[1])
        assert len(output) >= least
        assert not set(stops) & {*output[:-1], *output[:least]}
        assert (events[-1].finish_reason == "stop") == (output[-1] in stops)
        lengths.add(len(output) - least)
    assert len(lengths) > 2


def test_bad_words_never_come_whole_and_their_beginnings_may():
    plain = serve(make_engine(MODELS[0]), [request("0", prompts(1)[4], 20)])
    output = tokens(plain["0"])
    words = (tuple(output[3:6]), tuple(output[8:10]), (output[15],))
    ruled = serve(make_engine(MODELS[0]), [request("0", prompts(1)[4], 20, bad_words=words)])
    got = tokens(ruled["0"])
    assert got[:5] == output[:5] and got[5] != output[5]
    for word in words:
        assert all(tuple(got[i : i + len(word)]) != word for i in range(len(got)))


@pytest.mark.parametrize("look_ahead", [True, False])
def test_a_request_that_leaves_no_token_ends_with_an_error_and_hurts_nobody(look_ahead):
    dead_end = {"allowed_token_ids": (5, 6), "bad_words": ((5, 5), (5, 6), (6, 5), (6, 6))}
    neighbour = request("1", prompts(1)[3], 12)
    alone = serve(make_engine(MODELS[0]), [neighbour])
    engine = make_engine(MODELS[0], look_ahead=look_ahead)
    got = serve(engine, [request("0", [1, 2], 9, **dead_end), neighbour])
    assert [event.finish_reason for event in got["0"]] == [None, "error"]
    assert "leaves no token to draw" in got["0"][-1].message
    assert tokens(got["1"]) == tokens(alone["1"])


def test_nothing_compiles_when_rules_are_first_asked_for():
    compiled = 0

    def count(event: str, duration_secs: float, **_: object) -> None:
        nonlocal compiled
        compiled += event == "/jax/core/compile/backend_compile_duration"

    engine = make_engine(MODELS[0])
    serve(engine, [request("plain", [1, 2, 3], 3)])
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        serve(engine, [request("ruled", [1, 2, 3], 3, **PENALTIES[-1])])
        assert compiled == 0
        jax.jit(lambda x: x + jnp.float32(3))(np.zeros(7, np.float32)).block_until_ready()
        assert compiled == 1, "the count must be able to move"
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
