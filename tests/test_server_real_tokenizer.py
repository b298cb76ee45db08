"""The server with `jaxserve.tokenizer` instead of a toy."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from text_toys import byte_level, sentencepiece, spec_of
from toy_server import Server, running_server
from toy_worker import VOCAB_SIZE

from jaxserve.tokenizer import Tokenizer

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('the system speaks first') }}
{%- endif -%}
{{ message.content }}|
{%- endfor -%}
{%- if add_generation_prompt %}>{% endif -%}
{%- if shout %}!{% endif -%}
"""


@contextmanager
def serving(hub_tokenizer, **spec) -> Iterator[Server]:
    tokenizer = Tokenizer(spec_of(hub_tokenizer, **spec), vocab_size=VOCAB_SIZE)
    with running_server(tokenizer=tokenizer) as server:
        yield server


@pytest.fixture(scope="module")
def server():
    with serving(byte_level(), chat_template=TEMPLATE) as server:
        yield server


@pytest.mark.parametrize("text", ["東京タワー 🫖", " two  spaces\n\n- ", "👋🏽 ž"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 30])
def test_streamed_text_equals_the_whole_text(server, text, max_tokens):
    whole = server.complete(text, max_tokens=max_tokens)
    streamed = server.complete(text, max_tokens=max_tokens, stream=True)
    assert streamed.text() == whole.text()
    if max_tokens == 30:
        assert whole.text() == text


def test_chats_go_through_the_template(server):
    assert server.chat("à la carte").text() == "à la carte|>"
    assert server.chat("a", chat_template_kwargs={"shout": True}).text() == "a|>!"
    assert server.chat("a", add_generation_prompt=False).text() == "a|"


def test_a_template_s_refusal_is_a_400_with_its_words(server):
    messages = [{"role": role, "content": "a"} for role in ("user", "system")]
    reply = server.post("/v1/chat/completions", {"messages": messages})
    assert reply.status == 400
    assert "the system speaks first" in reply.error["message"]


def test_bos_makes_an_empty_prompt_possible_in_all_forms(server):
    assert server.complete("").status == 400
    with serving(sentencepiece(dummy_prefix=False), add_bos=True) as with_bos:
        for prompt in ("", [""], ["", "a"]):
            reply = with_bos.complete(prompt, max_tokens=1)
            assert reply.status == 200
            assert reply.json["usage"]["prompt_tokens"] == (3 if len(prompt) == 2 else 1)
        assert with_bos.complete([]).status == 400
        refused = with_bos.chat("a")
        assert refused.status == 400
        assert "no chat template" in refused.error["message"]
