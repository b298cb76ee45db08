"""What answers say: text, stop strings, log-probabilities, choices, usage; streamed and not."""

import hashlib
import itertools

import pytest
from toy_server import refusal, running_server, sse_lines, strict_json
from toy_worker import EOS, VOCAB_SIZE

KLMNOPQRS = [ord("K"), 257, ord("N"), 258, ord("Q"), ord("R"), ord("S")]  # K|LM|N|OP|Q|R|S
TEXT = "KLMNOPQRS"


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


def both_ways(server, prompt, **fields):
    """The same request answered in one piece and streamed; they must agree."""
    whole = server.complete(prompt, **fields)
    streamed = server.complete(prompt, stream=True, **fields)
    assert whole.status == streamed.status == 200, whole.body
    for index in range(len(whole.json["choices"])):
        assert whole.text(index) == streamed.text(index)
        assert whole.finish_reason(index) == streamed.finish_reason(index)
    return whole, streamed


# Characters


@pytest.mark.parametrize(
    "output",
    [
        "東京タワー".encode(),
        "🫖".encode() + b"A",
        "ž 👋🏽!".encode(),
        b"\xf0\x9f\xab",  # ends inside a character
        b"a\xffb\xc3",  # bytes that are never valid, and a cut at the end
    ],
)
def test_characters_split_over_tokens_stream_whole(server, output):
    for max_tokens in range(1, len(output) + 2):
        whole, _ = both_ways(server, list(output), max_tokens=max_tokens)
        assert whole.text() == output[:max_tokens].decode("utf-8", "replace")
        assert whole.json["usage"]["completion_tokens"] == max_tokens


def test_a_character_may_begin_in_one_token_and_end_in_several(server):
    _, streamed = both_ways(server, [261, 0xAB, 0x96, ord("A")])
    assert streamed.text() == "🫖A"


def test_leading_spaces_stay(server):
    whole, _ = both_ways(server, [260, ord("-"), 259, ord("\n")])
    assert whole.text() == "  - tea\n"


# Stop strings

SUBSTRINGS = sorted({TEXT[i:j] for i, j in itertools.combinations(range(10), 2) if j - i <= 5})


@pytest.mark.parametrize("stop", SUBSTRINGS)
def test_text_ends_before_the_stop_string(server, stop):
    whole, streamed = both_ways(server, KLMNOPQRS, stop=stop, logprobs=0)
    assert whole.text() == TEXT[: TEXT.find(stop)]
    assert whole.finish_reason() == "stop"
    # Tokens up to the one that completed the match count, and none after it.
    end = TEXT.find(stop) + len(stop)
    ends = itertools.accumulate([1, 2, 1, 2, 1, 1, 1])
    num_tokens = 1 + next(i for i, position in enumerate(ends) if position >= end)
    assert whole.json["usage"]["completion_tokens"] == num_tokens
    for reply in (whole, streamed):
        tokens = [t for c in reply.choices(0) for t in c["logprobs"]["tokens"]]
        assert len(tokens) == num_tokens


@pytest.mark.parametrize("stop", SUBSTRINGS[::7])
def test_the_stop_string_may_be_part_of_the_text(server, stop):
    whole, _ = both_ways(server, KLMNOPQRS, stop=stop, include_stop_str_in_output=True)
    assert whole.text() == TEXT[: TEXT.find(stop) + len(stop)]


def test_the_earliest_of_several_stop_strings_wins(server):
    assert both_ways(server, KLMNOPQRS, stop=["ZZ", "QR", "OP"])[0].text() == "KLMN"


def test_a_stop_string_that_only_begins_is_shown_in_the_end(server):
    for max_tokens in (4, 20):
        whole, _ = both_ways(server, list(b"KLMN"), stop="NX", max_tokens=max_tokens)
        assert whole.text() == "KLMN"


def test_a_stop_string_ends_the_generation_in_the_worker(server):
    reply = server.complete([65] * 5 + [66], stop="AAA", max_tokens=50, ignore_eos=True)
    assert reply.text() == ""
    assert server.becomes(server.is_idle)


def test_every_choice_looks_for_the_stop_string_itself(server):
    whole, _ = both_ways(server, ["abc", "bca", "xyz"], stop="c")
    assert [whole.text(i) for i in range(3)] == ["ab", "b", "xyz"]


# End tokens


def test_the_end_token_is_not_shown_and_counts(server):
    whole, _ = both_ways(server, "ab")
    assert (whole.text(), whole.finish_reason()) == ("ab", "stop")
    assert whole.json["usage"]["completion_tokens"] == 3


def test_ignore_eos_goes_on(server):
    whole, _ = both_ways(server, "ab", ignore_eos=True, max_tokens=5)
    assert (whole.text(), whole.finish_reason()) == ("ab", "length")
    shown, _ = both_ways(server, "ab", ignore_eos=True, max_tokens=4, skip_special_tokens=False)
    assert shown.text() == "ab<eos><eos>"


def test_stop_token_ids_end_like_eos(server):
    whole, _ = both_ways(server, KLMNOPQRS, stop_token_ids=[258])
    assert (whole.text(), whole.finish_reason()) == ("KLMN", "stop")
    assert whole.json["usage"]["completion_tokens"] == 4
    shown, _ = both_ways(server, KLMNOPQRS, stop_token_ids=[258], include_stop_str_in_output=True)
    assert shown.text() == "KLMNOP"


# Echo


@pytest.mark.parametrize("prompt", ["héllo", list("héllo".encode())])
def test_echo_puts_the_prompt_first(server, prompt):
    whole, _ = both_ways(server, prompt, echo=True, max_tokens=1)
    assert whole.text() == "hélloh"


# Log-probabilities


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("top", [None, 0, 1, 5, 20])
def test_completion_logprobs_have_an_entry_per_token(server, top, n):
    prompt = [*"aé".encode(), 261]
    whole, streamed = both_ways(server, prompt, logprobs=top, n=n)
    for index in range(n):
        (choice,) = whole.choices(index)
        if top is None:
            assert choice["logprobs"] is None
            assert all(c["logprobs"] is None for c in streamed.choices(index))
            continue
        scores = choice["logprobs"]
        assert scores["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0\\x9f", "<eos>"]
        assert scores["token_logprobs"] == [-0.25] * 5
        assert scores["text_offset"] == [0, 1, 1, 2, 2]
        for token, best in zip(scores["tokens"], scores["top_logprobs"], strict=True):
            assert token in best
            assert len(best) == max(top, 1)
            assert all(-9999.0 <= value <= 0.0 for value in best.values())
        joined = [c["logprobs"] for c in streamed.choices(index)]
        for name, values in scores.items():
            assert [v for part in joined for v in part[name]] == values


@pytest.mark.parametrize("top", [None, 0, 1, 20])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_list_exactly_the_alternatives_asked_for(server, top, stream):
    reply = server.chat("é", logprobs=True, top_logprobs=top, stream=stream)
    content = [
        entry for c in reply.choices(0) if c["logprobs"] for entry in c["logprobs"]["content"]
    ]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [ord(">")], list(b"<eos>")]
    for entry in content:
        assert entry["logprob"] == -0.25
        assert len(entry["top_logprobs"]) == (top or 0)
        assert all(-9999.0 <= other["logprob"] <= 0.0 for other in entry["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("prompt", ["The tea is žluté", [260, ord("-"), 259, 0xC5, 0xBE, 33], "x"])
def test_echo_with_logprobs_scores_the_prompt(server, prompt, max_tokens, stream):
    """How evaluation harnesses score a text: nothing generated, a number for each of its tokens."""
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "stream": stream}
    reply = server.complete(prompt, ignore_eos=True, **fields)
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    scores = [choice["logprobs"] for choice in reply.choices(0)]
    tokens, numbers, best, offsets = (
        [item for each in scores for item in each[name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert len(tokens) == len(numbers) == len(best) == len(offsets) == len(ids) + max_tokens
    assert (numbers[0], best[0]) == (None, None)
    assert numbers[1:] == [-token / 8 for token in ids[1:]] + [-0.25] * max_tokens
    for token, number, top in zip(tokens[1:], numbers[1:], best[1:], strict=True):
        assert top[token] == number
    pieces = [
        bytes.fromhex(token[6:].replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in tokens
    ]
    shown = b"".join(pieces)
    assert shown.decode().replace("<eos>", "") == reply.text()
    assert reply.finish_reason() == "length"
    starts = [0, *itertools.accumulate(map(len, pieces[: len(ids) - 1]))]
    assert offsets[: len(ids)] == [len(shown[:start].decode("utf-8", "ignore")) for start in starts]
    if not stream:
        assert reply.json["usage"]["completion_tokens"] == max_tokens
        assert reply.json["usage"]["prompt_tokens"] == len(ids)


def test_every_choice_of_every_prompt_is_scored(server):
    fields = {"echo": True, "logprobs": 0, "max_tokens": 0, "n": 2}
    reply = server.complete(["ab", "cde"], **fields)
    lists = [choice["logprobs"]["tokens"] for choice in reply.json["choices"]]
    assert lists == [["a", "b"]] * 2 + [["c", "d", "e"]] * 2
    assert reply.json["choices"][0]["logprobs"]["top_logprobs"] == [None, {"b": -ord("b") / 8}]
    assert reply.json["usage"]["completion_tokens"] == 0


def test_echo_without_logprobs_may_be_all_there_is(server):
    whole, _ = both_ways(server, "abc", echo=True, max_tokens=0)
    assert (whole.text(), whole.json["choices"][0]["logprobs"]) == ("abc", None)


@pytest.mark.parametrize("logprobs", [None, False])
def test_chats_have_no_logprobs_unless_asked(server, logprobs):
    assert server.chat("a", logprobs=logprobs).json["choices"][0]["logprobs"] is None
    assert server.chat("a", logprobs=logprobs, top_logprobs=0).status == 200
    refused = server.chat("a", logprobs=logprobs, top_logprobs=3)
    assert (refused.status, refused.error["param"]) == (400, "top_logprobs")
    assert server.chat("a", logprobs=True, top_logprobs=21).status == 400


# Choices and seeds


def letters(seed, choice, num_tokens):
    """What the toy draws for a choice, from the documented derivation of seeds."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{choice}".encode()).digest()[:8], "big")
    digests = [
        hashlib.sha256(f"{key}:{position}".encode()).digest() for position in range(num_tokens)
    ]
    return "".join(chr(97 + int.from_bytes(digest[:8], "big") % 26) for digest in digests)


@pytest.mark.parametrize("seed", [11, 0, -1, 2**63 - 1, -(2**63)])
def test_a_seed_reproduces_every_choice_and_choices_differ(server, seed):
    whole, _ = both_ways(server, "a", temperature=1.0, n=4, seed=seed, max_tokens=12)
    assert [whole.text(i) for i in range(4)] == [letters(seed, i, 12) for i in range(4)]
    assert len({whole.text(i) for i in range(4)}) == 4


def test_a_seeded_prompt_does_not_depend_on_its_place_in_a_list(server):
    alone = server.complete("b", temperature=1.0, n=2, seed=5, max_tokens=12)
    listed, _ = both_ways(server, ["a", "b"], temperature=1.0, n=2, seed=5, max_tokens=12)
    assert [listed.text(i) for i in (2, 3)] == [alone.text(i) for i in (0, 1)]


def test_unseeded_requests_all_differ(server):
    texts = [
        server.complete("a", temperature=1.0, n=2, max_tokens=12).text(index)
        for _ in range(5)
        for index in range(2)
    ]
    assert len(set(texts)) == 10


def test_greedy_choices_are_equal(server):
    whole, _ = both_ways(server, "same", n=4)
    assert {whole.text(i) for i in range(4)} == {"same"}


def test_choices_are_numbered_prompt_after_prompt_and_usage_counts_prompts_once(server):
    whole, streamed = both_ways(server, ["ab", "cde"], n=2)
    assert [c["index"] for c in whole.json["choices"]] == [0, 1, 2, 3]
    assert [whole.text(i) for i in range(4)] == ["ab", "ab", "cde", "cde"]
    assert whole.json["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3 + 3 + 4 + 4,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert all(len([c for c in streamed.choices(i) if c["finish_reason"]]) == 1 for i in range(4))


# The form of a stream


@pytest.mark.parametrize("chat", [False, True])
def test_usage_comes_last_and_only_when_asked_for(server, chat):
    ask = server.chat if chat else server.complete
    plain = ask("ab", stream=True)
    assert all("usage" not in event for event in plain.events)
    counted = ask("ab", stream=True, stream_options={"include_usage": True}).events
    assert all(event["usage"] is None for event in counted[:-1])
    assert counted[-1]["choices"] == []
    assert counted[-1]["usage"] == ask("ab").json["usage"]
    ids = {(event["id"], event["created"], event["model"]) for event in counted}
    assert len(ids) == 1


def test_log_probabilities_of_a_prompt_come_if_asked_for(server):
    """The toy's: of each token -1/8 of its id, and of token 7 nothing."""
    low = {"logprob": -9999.0, "rank": 2, "decoded_token": "\x07"}

    def expected(prompt, top):
        own = [
            {str(t): {"logprob": -t / 8, "rank": 1, "decoded_token": chr(t)}} for t in prompt[1:]
        ]
        return [None, *(each | ({"7": low} if top > 1 else {}) for each in own)]

    for top in (0, 1, 2, 20):
        reply = server.complete(["abc", "d"], n=2, prompt_logprobs=top)
        for index, prompt in enumerate((b"abc", b"abc", b"d", b"d")):
            (choice,) = reply.choices(index)
            assert choice["prompt_logprobs"] == expected(prompt, top)
        assert server.chat("ab", prompt_logprobs=top).json["prompt_logprobs"] == expected(
            b"ab>", top
        )
    both = server.complete("ab", prompt_logprobs=2, echo=True, logprobs=1, max_tokens=0)
    assert both.choices(0)[0]["prompt_logprobs"] == expected(b"ab", 2)
    assert [len(t or ()) for t in both.choices(0)[0]["logprobs"]["top_logprobs"]] == [0, 1]
    assert b"prompt_logprobs" not in server.complete("ab").body
    for bad in ({"prompt_logprobs": 21}, {"prompt_logprobs": -1}):
        refusal(server.complete("ab", **bad), "prompt_logprobs")
    refusal(server.complete("ab", prompt_logprobs=1, stream=True), "prompt_logprobs")


@pytest.mark.parametrize("stream", [False, True])
def test_ids_of_prompts_and_choices_come_if_asked_for(server, stream):
    def ids(reply, index):
        return [t for choice in reply.choices(index) for t in choice.get("token_ids", [])]

    reply = server.complete(["ab", "c"], n=2, stream=stream, return_token_ids=True)
    for index, prompt in enumerate((b"ab", b"ab", b"c", b"c")):
        assert ids(reply, index) == [*prompt, EOS]
        first, *others = reply.choices(index)
        assert first["prompt_token_ids"] == [*prompt]
        assert not any("prompt_token_ids" in choice for choice in others)
    reply = server.chat("ab", n=2, stream=stream, return_token_ids=True)
    assert [ids(reply, index) for index in range(2)] == [[*b"ab>", EOS]] * 2
    whole = reply.events[0] if stream else reply.json
    assert whole["prompt_token_ids"] == [*b"ab>"]
    assert b"token_ids" not in server.chat("ab", stream=stream).body


@pytest.mark.parametrize("chat", [False, True])
def test_every_chunk_can_count_the_tokens_so_far(server, chat):
    ask = server.chat if chat else server.complete
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = ask("abcdef", stream=True, n=2, stream_options=options).events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] > 0
    prompt = last["usage"]["prompt_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {prompt}
    assert chunks[-1]["usage"] == last["usage"]


def test_every_choice_of_a_chat_starts_with_its_role(server):
    reply = server.chat("ab", stream=True, n=3)
    for index in range(3):
        first, *others = [c["delta"] for c in reply.choices(index)]
        assert first == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in others)
        assert reply.text(index) == "ab>"
    assert {event["object"] for event in reply.events} == {"chat.completion.chunk"}


def test_a_stream_is_server_sent_events(server):
    reply = server.complete("ab", stream=True)
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["Cache-Control"] == "no-cache"
    *events, done = sse_lines(reply.body)
    assert done == "[DONE]"
    assert all(strict_json(event.encode())["object"] == "text_completion" for event in events)


# Without a tokenizer


def test_a_model_without_tokenizer_speaks_ids():
    with running_server(tokenizer=None) as server:
        whole, _ = both_ways(server, [7, 8, VOCAB_SIZE - 1])
        assert whole.text() == f"7 8 {VOCAB_SIZE - 1} "
        assert both_ways(server, [7, EOS], ignore_eos=True, max_tokens=2)[0].text() == f"7 {EOS} "
        assert "token ids" in server.complete("text").error["message"]
        assert "token ids" in server.chat("text").error["message"]
