"""Prompts, lengths, settings and messages: what can never be served is refused before it starts."""

import threading

import pytest
from toy_model import MAX_CONTEXT
from toy_server import refusal, running_server
from toy_worker import EOS, SLOW, VOCAB_SIZE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture(autouse=True)
def a_normal_request_still_works_and_nothing_is_left_behind(server):
    yield
    assert server.complete("still here").text() == "still here"
    assert server.request("GET", "/health").status == 200
    assert server.becomes(server.is_idle)


# Prompts


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ok", ""], [[65], []]])
@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_prompt_is_refused_and_with_it_the_whole_request(server, prompt, stream):
    before = server.metric("jaxserve_output_tokens_total")
    refusal(server.complete(prompt, stream=stream), "prompt")
    assert server.metric("jaxserve_output_tokens_total") == before


def test_a_missing_prompt_is_refused(server):
    assert "prompt is missing" in refusal(server.post(COMPLETIONS, {}))
    assert "prompt is missing" in refusal(server.complete(None))


@pytest.mark.parametrize(
    "literal, offender",
    [
        (f"[5, {VOCAB_SIZE}]", str(VOCAB_SIZE)),
        ("[-1]", "-1"),
        ("[4294967294]", "4294967294"),
        ("[9223372036854775808]", "9223372036854775808"),
        (f"[{'9' * 4000}]", "9" * 20),
        ("[1.0]", "float"),
        ("[true]", "bool"),
        ("[null]", "null"),
        ('[5, "7"]', "mixes"),
        ("[[5], 7]", "mixes"),
        (f"[[1], [{VOCAB_SIZE}]]", str(VOCAB_SIZE)),
        ("7", "int"),
        ("{}", "object"),
    ],
)
def test_prompt_ids_outside_the_vocabulary_are_refused_by_name(server, literal, offender):
    reply = server.post(COMPLETIONS, f'{{"prompt":{literal}}}'.encode())
    assert offender in refusal(reply, "prompt")


def test_the_first_and_last_ids_are_accepted(server):
    assert server.complete([0, VOCAB_SIZE - 1], max_tokens=1).status == 200


@pytest.mark.parametrize("ids", [[VOCAB_SIZE], [-1], [5, 2**40]])
def test_stop_token_ids_outside_the_vocabulary_are_refused(server, ids):
    refusal(server.complete("a", stop_token_ids=ids), "stop_token_ids")


@pytest.mark.parametrize(
    ("bias", "offender"),
    [
        ({str(VOCAB_SIZE): 5}, str(VOCAB_SIZE)),
        ({"-1": 5}, "-1"),
        ({"x": 1}, "'x'"),
        ({"07": 1}, "'07'"),
        ({" 7": 1}, "' 7'"),
        ({"\u0667": 1}, "\u0667"),
        ({"9" * 5000: 1}, "9" * 40),
        ({"5": 1e9}, "between -100 and 100"),
        ({"5": -100.5}, "between -100 and 100"),
        ({"5": None}, "null"),
        ({"5": "1"}, "str"),
        ({"5": True}, "bool"),
        ([5], "array"),
        ({str(i): 1 for i in range(1025)}, "1024"),
    ],
    ids=str,
)
def test_a_bias_on_what_is_no_token_is_refused(server, bias, offender):
    assert offender in refusal(server.complete("a", logit_bias=bias), "logit_bias")
    assert offender in refusal(server.chat("a", logit_bias=bias), "logit_bias")


def test_a_bias_on_the_first_and_last_ids_is_accepted(server):
    for bias in ({}, {"0": -100, str(VOCAB_SIZE - 1): 100}):
        assert server.complete("ab", logit_bias=bias).text() == "ab"


def test_settings_that_leave_no_token_are_refused(server):
    banned = {"allowed_token_ids": [ord("a")], "bad_words": ["a"]}
    assert "bans every one" in refusal(server.complete("x", **banned), "allowed_token_ids")
    only_stops = {"allowed_token_ids": [EOS, 5], "stop_token_ids": [5], "min_tokens": 1}
    assert "nothing is left" in refusal(server.complete("x", **only_stops), "min_tokens")
    assert server.complete("x", **only_stops, ignore_eos=True).status == 200
    many = {"stop_token_ids": list(range(128))}
    assert server.complete("x", **many).status == 200
    assert "128" in refusal(server.complete("x", min_tokens=1, **many), "stop_token_ids")


def test_a_neighbour_is_unchanged_by_refusals(server):
    results = []
    prompt = [SLOW, *b"unchanged"]
    thread = threading.Thread(target=lambda: results.append(server.complete(prompt, stream=True)))
    thread.start()
    for bad in ([-1], [VOCAB_SIZE], "", [[]]):
        refusal(server.complete(bad), "prompt")
    thread.join(10)
    assert results[0].text() == "unchanged"


# Lengths


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "num_prompt, max_tokens, expected",
    [
        (63, 1, 1),
        (1, 63, 63),
        (60, 4, 4),
        (63, None, 1),
        (1, None, 16),
        (60, None, 4),
    ],
)
def test_lengths_that_fit(server, num_prompt, max_tokens, expected, stream):
    fields = {"max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    reply = server.complete([65] * num_prompt, **fields)
    usage = reply.events[-1]["usage"] if stream else reply.json["usage"]
    assert usage == {
        "prompt_tokens": num_prompt,
        "completion_tokens": expected,
        "total_tokens": num_prompt + expected,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert reply.finish_reason() == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "num_prompt, max_tokens", [(64, 1), (65, 1), (64, None), (60, 10), (1, 64), (1, 10**12)]
)
def test_lengths_that_do_not_fit_are_refused_with_all_the_numbers(
    server, num_prompt, max_tokens, stream
):
    reply = server.complete([65] * num_prompt, max_tokens=max_tokens, stream=stream)
    message = refusal(reply, "prompt" if num_prompt >= MAX_CONTEXT else "max_tokens")
    for number in (MAX_CONTEXT, num_prompt, max_tokens or 1):
        assert str(number) in message
    chat = server.chat("A" * (num_prompt - 1), max_tokens=max_tokens, stream=stream)
    refusal(chat, "messages" if num_prompt >= MAX_CONTEXT else "max_tokens")


def test_a_chat_may_use_all_of_the_context(server):
    reply = server.chat("A" * 9, ignore_eos=True)
    assert reply.json["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": MAX_CONTEXT - 10,
        "total_tokens": MAX_CONTEXT,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize("literal", ["0", "-1", "1.5", '"5"', "true", "1e12", "1.0"])
def test_max_tokens_must_be_a_positive_whole_number(server, literal):
    refusal(
        server.post(COMPLETIONS, f'{{"prompt":"a","max_tokens":{literal}}}'.encode()), "max_tokens"
    )


def test_max_completion_tokens_is_the_newer_name_in_chats(server):
    assert server.chat("abcdef", max_completion_tokens=2).text() == "ab"
    assert server.chat("abcdef", max_completion_tokens=2, max_tokens=2).text() == "ab"
    refusal(server.chat("abcdef", max_completion_tokens=2, max_tokens=3), "max_tokens")


# Sampling


@pytest.mark.parametrize(
    "temperature", ["0", "-0.0", "9e-6", "1e-7", "1e-30", "1e-38", "1e-45", "1e-400"]
)
def test_tiny_temperatures_are_greedy(server, temperature):
    body = f'{{"prompt":"greedy","max_tokens":20,"temperature":{temperature}}}'.encode()
    assert server.post(COMPLETIONS, body).text() == "greedy"


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1, 2.5, 1000])
def test_other_temperatures_are_taken_as_they_are(server, temperature):
    reply = server.complete("GREEDY", temperature=temperature, seed=3, max_tokens=6)
    assert reply.status == 200
    assert reply.text() != "GREEDY"


@pytest.mark.parametrize(
    "field, bad, good",
    [
        ("top_p", [0, -0.1, 1.1], [1e-9, 1]),
        ("min_p", [-0.1, 1.1], [0, 1]),
        ("top_k", [-2, 1.5, 2**31], [-1, 0, 1, 2**31 - 1]),
        ("presence_penalty", [-2.1, 2.1, "0", True], [-2, 0.5, 2]),
        ("frequency_penalty", [-2.1, 2.1, "0", False], [-2, 1e-3, 2]),
        ("repetition_penalty", [0, -1, 0.009, 101, True], [0.01, 1, 1.1, 100]),
        ("min_tokens", [-1, 21, 1.5, "1", True], [0, 2]),
        (
            "bad_words",
            ["a", [1], [""], ["  "], ["x" * 16], [str(i) for i in range(65)], ["a"] * 129],
            [[], ["zebra"], [str(i) for i in range(64)]],
        ),
        (
            "allowed_token_ids",
            [[], [VOCAB_SIZE], [-1], [2**40], ["1"], 5, [5] * 1025],
            [[0, VOCAB_SIZE - 1], list(range(VOCAB_SIZE))],
        ),
        ("n", [0, -1, 129, True, "2"], [1, 2]),
        ("seed", [2**63, -(2**63) - 1, 1.5, "1"], [0, -1, 2**63 - 1, -(2**63)]),
        ("stop", ["", ["a", ""], ["x"] * 17, [1], 3, "x" * 257], [[], "x", ["x"] * 16]),
        ("stream", [1, "true"], [False]),
        ("echo", [1, "yes"], [False]),
        ("logprobs", [-1, 21, True, 1.0], [0, 1, 5, 6, 20]),
    ],
)
def test_values_out_of_range_are_refused_by_name(server, field, bad, good):
    for value in bad:
        refusal(server.complete("ab", **{field: value}), field)
    for value in good:
        assert server.complete("ab", **{field: value}).text() == "ab"


def test_a_prompt_is_cut_at_its_beginning_to_the_tokens_asked_for(server):
    for keep, expected in ((3, "def"), (6, "abcdef"), (9, "abcdef")):
        reply = server.complete("abcdef", truncate_prompt_tokens=keep)
        assert reply.text() == expected
        assert reply.json["usage"]["prompt_tokens"] == min(keep, 6)
    long = "x" * (MAX_CONTEXT - 9) + "a" * 8 + "end"
    reply = server.complete(long, truncate_prompt_tokens=-1, max_tokens=MAX_CONTEXT - 3, echo=True)
    assert reply.text() == "end" * 2
    for bad in (0, -2, MAX_CONTEXT + 1):
        refusal(server.complete("a", truncate_prompt_tokens=bad), "truncate_prompt_tokens")


def test_a_chat_can_go_on_with_its_last_message_and_does_not_begin_a_turn_then(server):
    assert server.chat("ab", max_tokens=9).text() == "ab>"
    assert server.chat("ab", max_tokens=9, continue_final_message=True).text() == "ab"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refusal(server.chat("ab", **both), "continue_final_message")


def test_stream_options_need_a_stream(server):
    refusal(server.complete("a", stream_options={"include_usage": True}), "stream_options")
    refusal(
        server.complete("a", stream=True, stream_options={"continuous_usage_stats": True}),
        "stream_options",
    )
    refusal(server.complete("a", stream=True, stream_options={"other": 1}), "stream_options")


def test_nothing_may_be_generated_with_echo_only(server):
    assert "0 with echo" in refusal(server.complete("a", max_tokens=0), "max_tokens")
    refusal(server.complete("a", max_tokens=-1, echo=True), "max_tokens")
    refusal(server.chat("a", max_tokens=0), "max_tokens")
    refusal(server.complete([65] * 65, max_tokens=0, echo=True), "prompt")
    assert server.complete([65] * 64, max_tokens=0, echo=True).text() == "A" * 64


# Messages


def test_text_parts_are_the_same_prompt_as_their_text(server):
    parts = [{"type": "text", "text": "Name a"}, {"type": "text", "text": " fruit."}]
    messages = [{"role": "user", "content": parts}]
    reply = server.post(CHAT, {"messages": messages, "temperature": 0})
    assert reply.text() == server.chat("Name a fruit.").text() == "Name a fruit.>"
    assert reply.json["usage"] == server.chat("Name a fruit.").json["usage"]


@pytest.mark.parametrize(
    "message, word",
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "not supported"),
        ({"role": "user", "content": [{"type": "text"}]}, "missing"),
        ({"role": "user", "content": None}, "missing"),
        ({"role": "user"}, "missing"),
        ({"role": "user", "content": 5}, "int"),
        ({"role": "user", "content": {"type": "text"}}, "object"),
        ({"content": "a"}, "role"),
        ({"role": "tool", "content": "a"}, "tool"),
        ({"role": "user\nsystem", "content": "a"}, "expected one of"),
        ({"role": "assistant", "content": "a", "tool_calls": [{}]}, "does not know"),
        ({"role": "user", "content": "a", "colour": "red"}, "colour"),
        ("hello", "str"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(server, message, word):
    reply = server.post(CHAT, {"messages": [message]})
    assert reply.status == 400
    assert word in reply.error["message"]


def test_an_empty_conversation_is_refused(server):
    refusal(server.post(CHAT, {"messages": []}), "messages")
    refusal(server.post(CHAT, {}), "messages")
    refusal(server.chat("", add_generation_prompt=False), "messages")


def test_a_conversation_of_only_a_system_message_works(server):
    messages = [{"role": "system", "content": "be brief"}]
    assert server.post(CHAT, {"messages": messages, "temperature": 0}).text() == "be brief>"


def test_the_template_s_own_refusal_reaches_the_client(server):
    messages = [{"role": role, "content": "a"} for role in ("system", "developer")]
    message = refusal(server.post(CHAT, {"messages": messages}), "messages")
    assert message == "only one system message, please"


def test_template_arguments_cannot_replace_the_messages(server):
    refusal(server.chat("a", chat_template_kwargs={"messages": []}), "chat_template_kwargs")
    assert server.chat("a", chat_template_kwargs={"enable_thinking": False}).status == 200


def test_a_fed_back_answer_is_a_valid_message(server):
    answer = server.chat("ab").json["choices"][0]["message"]
    messages = [{"role": "user", "content": "ab"}, answer]
    assert server.post(CHAT, {"messages": messages, "temperature": 0}).text() == "abab>>"
