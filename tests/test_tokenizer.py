"""Prompts and conversations to ids: BOS exactly once, special tokens recognised, text intact."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import text_toys

from jaxserve.errors import ConfigError, RequestError
from jaxserve.tokenizer import Tokenizer

WITH_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
WITHOUT_BOS = WITH_BOS.removeprefix("{{ bos_token }}")
HI = [{"role": "user", "content": "hi"}]
HUBS = {
    "byte-level": text_toys.byte_level(),
    "sentencepiece": text_toys.sentencepiece(dummy_prefix=False),
    "sentencepiece with dummy prefix": text_toys.sentencepiece(dummy_prefix=True),
}


def make(kind: str = "byte-level", *, add_bos=False, chat_template=None) -> Tokenizer:
    spec = text_toys.spec_of(HUBS[kind], add_bos=add_bos, chat_template=chat_template)
    return Tokenizer(spec, vocab_size=HUBS[kind].get_vocab_size())


def bos_count(tokenizer: Tokenizer, ids: list[int]) -> int:
    return ids.count(bos_id(tokenizer))


def bos_id(tokenizer: Tokenizer) -> int:
    return next(
        i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == text_toys.BOS.encode()
    )


@pytest.mark.parametrize("kind", HUBS)
@pytest.mark.parametrize("text", ["", "hello hello", "  two", "東 ž\n"])
def test_plain_text_gets_one_bos_if_the_model_wants_it_and_none_otherwise(kind, text):
    bare = HUBS[kind].encode(text, add_special_tokens=False).ids
    assert make(kind).encode_prompt(text) == bare
    wanting = make(kind, add_bos=True)
    assert wanting.encode_prompt(text) == [bos_id(wanting), *bare]


@pytest.mark.parametrize("kind", HUBS)
@pytest.mark.parametrize("add_bos", [True, False])
def test_text_that_starts_with_bos_is_left_as_the_client_wrote_it(kind, add_bos):
    tokenizer = make(kind, add_bos=add_bos)
    assert bos_count(tokenizer, tokenizer.encode_prompt("<s>hello")) == 1
    assert bos_count(tokenizer, tokenizer.encode_prompt("<s><s>hello")) == 2


@pytest.mark.parametrize("kind", HUBS)
@pytest.mark.parametrize(
    "template, add_bos, expected",
    [
        pytest.param(WITH_BOS, True, 1, id="both want it"),
        pytest.param(WITH_BOS, False, 1, id="the template writes it"),
        pytest.param(WITHOUT_BOS, True, 1, id="the model wants it"),
        pytest.param(WITHOUT_BOS, False, 0, id="nobody wants it"),
        pytest.param("{{ bos_token }}" + WITH_BOS, True, 1, id="the template writes it twice"),
    ],
)
def test_a_conversation_starts_with_one_bos_whoever_wants_it(kind, template, add_bos, expected):
    tokenizer = make(kind, add_bos=add_bos, chat_template=template)
    ids = tokenizer.encode_chat(HI)
    assert bos_count(tokenizer, ids) == expected
    assert ids[:expected] == [bos_id(tokenizer)] * expected
    assert tokenizer.decode(ids).endswith("[user] hi")


def test_special_tokens_in_a_text_are_recognised():
    tokenizer = make()
    ids = tokenizer.encode_prompt("he</s><pad>")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"he", b"</s>", b"<pad>"]
    assert tokenizer.decode(ids) == "he"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he</s><pad>"


def test_a_conversation_in_parts_has_the_ids_of_the_string():
    tokenizer = make(chat_template=WITH_BOS)
    parts = [{"type": "text", "text": "Name a"}, {"type": "text", "text": " fruit."}]
    string = tokenizer.encode_chat([{"role": "user", "content": "Name a fruit."}])
    assert tokenizer.encode_chat([{"role": "user", "content": parts}]) == string


def test_an_answer_can_go_on_with_the_last_message():
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"
    begun = [*HI, {"role": "assistant", "content": "Well, "}]
    tokenizer = make(chat_template=template)
    text = tokenizer.render_chat(begun, add_generation_prompt=False, continue_final_message=True)
    assert text == "[user] hi</s>[assistant] Well, "


@pytest.mark.parametrize(
    "template, last",
    [
        ("{{ messages[-1].content }}", {"role": "assistant", "content": ""}),
        ("{{ messages[-1].content }}", {"role": "assistant", "content": None}),
        ("{{ messages[-1].content | length }}", {"role": "assistant", "content": "Well"}),
    ],
)
def test_a_message_that_cannot_be_gone_on_with_is_refused(template, last):
    tokenizer = make(chat_template=template)
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat([*HI, last], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_a_model_without_a_template_says_what_to_use_instead():
    tokenizer = make()
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template: use /v1/completions"):
        tokenizer.encode_chat(HI)


def test_a_template_for_tools_has_the_conversations_with_tools():
    spec = text_toys.spec_of(HUBS["byte-level"], chat_template="plain")
    spec = dataclasses.replace(spec, tool_template="tools{{ tools | length }}")
    tokenizer = Tokenizer(spec, vocab_size=400)
    called = [*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert tokenizer.render_chat(HI) == "plain"
    assert tokenizer.render_chat(HI, tools=[{}]) == "tools1"
    assert tokenizer.render_chat(called, tools=[]) == "tools0"
    assert "tools" in tokenizer.template_variables
    assert tokenizer.chat_template == "tools{{ tools | length }}"


def test_half_a_surrogate_pair_is_refused_and_located():
    tokenizer = make(chat_template=WITH_BOS)
    with pytest.raises(RequestError, match=r"character 2 .* U\+D83E") as caught:
        tokenizer.encode_prompt("ab\ud83e")
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="surrogate") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "\udc00"}])
    assert caught.value.param == "messages"


def test_a_token_the_model_has_no_row_for_is_refused():
    hub = HUBS["byte-level"]
    tokenizer = Tokenizer(text_toys.spec_of(hub), vocab_size=hub.token_to_id("<tool>"))
    assert tokenizer.encode_prompt("hello")
    with pytest.raises(RequestError, match="'<tool>'"):
        tokenizer.encode_prompt("hello<tool>")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"tokenizer_json": "{"}, "cannot be read"),
        ({"bos_token": "<missing>"}, "'<missing>', which the vocabulary lacks"),
        ({"bos_token": None}, "None"),
    ],
)
def test_a_vocabulary_that_cannot_work_is_refused_at_the_start(change, reason):
    spec = dataclasses.replace(text_toys.spec_of(HUBS["byte-level"], add_bos=True), **change)
    with pytest.raises(ConfigError, match=reason):
        Tokenizer(spec, vocab_size=1000)


def test_truncation_and_padding_left_in_a_published_file_are_ignored():
    hub = text_toys.byte_level()
    hub.enable_truncation(4)
    hub.enable_padding(length=64)
    tokenizer = Tokenizer(text_toys.spec_of(hub), vocab_size=hub.get_vocab_size())
    assert tokenizer.encode_prompt("hello" * 10) == make().encode_prompt("hello" * 10)
    assert len(tokenizer.encode_prompt("he")) == 1


def test_threads_may_share_a_tokenizer():
    shared = make("sentencepiece", chat_template=WITH_BOS)
    texts = [f"hello {'東' * n} {chr(0x4E00 + n)}" for n in range(60)]

    def round_trip(text: str) -> tuple[str, str]:
        ids = shared.encode_prompt(text)
        return shared.decode(ids), shared.render_chat([{"role": "user", "content": text}])

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(round_trip, texts, timeout=30))
    assert results == [(text, f"<s>[user] {text}") for text in texts]


def test_text_handling_loads_without_jax():
    program = "import sys, jaxserve.tokenizer, jaxserve.stop_strings; print('jax' in sys.modules)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "False\n"
