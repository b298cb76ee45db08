"""One choice fed token by token, and the chunks it turns into. No server, no socket."""

import json

import pytest
from toy_model import ToyTokenizer
from toy_worker import EOS, VOCAB_SIZE

from jaxserve.errors import EngineStopped
from jaxserve.request import TokenEvent
from jaxserve.server.choice import Choice, Delta
from jaxserve.server.generation import plan_chat, plan_completion
from jaxserve.server.limits import Limits
from jaxserve.server.openai import ChatBody, CompletionBody, Message, StreamOptions
from jaxserve.server.replies import PromptDetails, Usage
from jaxserve.server.stream import ChunkEncoder

LIMITS = Limits(VOCAB_SIZE, 64, 1024, (EOS,))
TOKENIZER = ToyTokenizer()


def completion(**fields):
    return plan_completion(CompletionBody(**{"prompt": "p"} | fields), TOKENIZER, LIMITS)


def feed(generation, token_ids, last="stop"):
    """(delta, abort wanted) after each token; the last one comes with a finish reason."""
    choice = Choice(generation, 0, TOKENIZER)
    steps = []
    for i, token_id in enumerate(token_ids):
        reason = last if i == len(token_ids) - 1 else None
        abort = choice.push(TokenEvent("r", token_id, -0.5, (), reason))
        steps.append((choice.take(), abort))
    return steps


def texts(steps):
    return [delta.text if delta else None for delta, _ in steps]


def test_an_incomplete_character_waits_for_its_end():
    steps = feed(completion(), [261, 0xAB, 0x96, ord("A"), EOS])
    assert texts(steps) == [None, None, "🫖", "A", ""]


def test_what_may_become_a_stop_string_waits_and_its_scores_wait_with_it():
    steps = feed(completion(stop="12!", logprobs=0), [*b"ab12x", EOS])
    assert texts(steps) == ["a", "b", None, None, "12x", ""]
    assert [len(delta.scored) if delta else 0 for delta, _ in steps] == [1, 1, 0, 0, 3, 1]


def test_the_match_ends_the_choice_and_asks_for_an_abort():
    steps = feed(completion(stop="12", logprobs=0), [*b"a12xyz", EOS])
    assert texts(steps) == ["a", None, "", None, None, None, None]
    assert [abort for _, abort in steps] == [False, False, True, False, False, False, False]
    delta = steps[2][0]
    assert (delta.finish_reason, len(delta.scored)) == ("stop", 2)


def test_no_abort_is_asked_for_when_the_engine_stopped_by_itself():
    ((delta, abort),) = feed(completion(stop="1"), [ord("1")], last="length")
    assert (delta.text, delta.finish_reason, abort) == ("", "stop", False)


def test_the_flushed_end_of_a_character_may_complete_a_stop_string():
    steps = feed(completion(stop="a\ufffd"), [ord("a"), 0xC3], last="length")
    assert steps[-1][0] == Delta("", (), "stop", token_ids=(ord("a"), 0xC3))


def test_held_text_is_shown_at_the_end():
    steps = feed(completion(stop="12!"), [*b"12"], last="length")
    assert texts(steps) == [None, "12"]


def test_an_engine_that_gives_up_is_an_error_with_its_own_words():
    choice = Choice(completion(), 0, TOKENIZER)
    with pytest.raises(EngineStopped, match="no pages"):
        choice.push(TokenEvent("r", None, finish_reason="error", message="no pages"))


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_spliced_chunks_are_what_encoding_them_whole_would_give(kind, include_usage):
    form = {"n": 2, "stream": True, "stream_options": StreamOptions(include_usage)}
    if kind == "chat":
        body = ChatBody(messages=[Message("user", "p")], **form)
        generation = plan_chat(body, TOKENIZER, LIMITS)
    else:
        generation = completion(**form)
    text = 'quotes " and \\ and \u2028 and \x00 and 🫖'
    encoder = ChunkEncoder(generation, TOKENIZER, model='m"x', created=7)
    encoder.delta(1, Delta("first", (), None))
    spliced = encoder.delta(1, Delta(text, (), None))
    whole = encoder.delta(1, Delta(text, (), "length"))
    assert spliced == whole.replace(b'"length"', b"null")
    choice = json.loads(spliced.removeprefix(b"data: "))["choices"][0]
    assert choice["index"] == 1
    assert (choice["delta"]["content"] if kind == "chat" else choice["text"]) == text


def test_the_usage_chunk_has_no_choices():
    generation = completion(stream=True, stream_options=StreamOptions(include_usage=True))
    encoder = ChunkEncoder(generation, TOKENIZER, model="m", created=7)
    chunk, done, _ = encoder.end(Usage(1, 2, 3, PromptDetails(0))).split(b"\n\n")
    assert done == b"data: [DONE]"
    chunk = json.loads(chunk.removeprefix(b"data: "))
    assert chunk["choices"] == []
    assert chunk["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_what_is_asked_of_the_logits_reaches_the_engine():
    generation = completion(
        n=2,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.5,
        logit_bias={"7": 2, "299": -100},
        allowed_token_ids=[7, 8, 7],
        bad_words=["ab", " c"],
        min_tokens=3,
        stop_token_ids=[9],
    )
    for sampling in (request.sampling for request in generation.requests):
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
        assert sampling.repetition_penalty == 1.5
        assert sampling.logit_bias == ((7, 2.0), (299, -100.0))
        assert sampling.allowed_token_ids == (7, 8)
        assert sampling.bad_words == tuple(tuple(w) for w in (b"ab", b" ab", b"c", b" c"))
        assert (sampling.min_tokens, sampling.stop_token_ids) == (3, (EOS, 9))
        assert sampling.has_rules


def test_a_request_that_asks_for_nothing_special_has_no_rules():
    plain = completion(presence_penalty=0, repetition_penalty=1, logit_bias={}, bad_words=[])
    assert not plain.requests[0].sampling.has_rules
    assert completion(allowed_token_ids=[5]).requests[0].sampling.has_rules


def test_stop_strings_count_after_min_tokens_only():
    text = b"abcabcabc"
    for least, shown in ((0, "ab"), (2, "ab"), (3, "abcab"), (5, "abcab"), (6, "abcabcab")):
        choice = Choice(completion(stop="c", min_tokens=least), 0, TOKENIZER)
        for i, token in enumerate(text):
            choice.push(TokenEvent("", token, finish_reason="length" if i == 8 else None))
        delta = choice.take()
        assert (delta.text, delta.finish_reason) == (shown, "stop")
