"""/tokenize and /detokenize: the tokens a prompt would have, and the text that tokens are."""

import json
import threading

import pytest
from text_toys import byte_level, sentencepiece, spec_of
from toy_model import BROKEN, MAX_CONTEXT, MODEL_NAME, ToyTokenizer
from toy_server import refusal, running_server
from toy_worker import EOS, VOCAB_SIZE

from jaxserve.server import tokenization
from jaxserve.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}|{% endfor %}{% if shout %}!{% endif %}"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture(autouse=True)
def a_normal_request_still_works_and_nothing_is_left_behind(server):
    yield
    assert server.complete("still here").text() == "still here"
    assert server.service.num_tokenizing == 0


def tokens(server, **body):
    reply = server.post("/tokenize", body)
    assert reply.status == 200, reply.body
    assert set(reply.json) == {"tokens", "count", "max_model_len", "token_strs"}
    assert reply.json["count"] == len(reply.json["tokens"])
    return reply.json["tokens"]


def test_a_text_there_and_back(server):
    text = "two  spaces, 東京 🫖\n"
    ids = tokens(server, prompt=text, model=MODEL_NAME)
    assert ids == list(text.encode())
    assert server.post("/detokenize", {"tokens": ids}).json == {"prompt": text}


def test_the_answer_says_how_long_a_sequence_may_be_and_what_its_tokens_look_like(server):
    reply = server.post("/tokenize", {"prompt": "é!", "return_token_strs": True}).json
    assert reply["max_model_len"] == MAX_CONTEXT
    assert reply["token_strs"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert server.post("/tokenize", {"prompt": "a"}).json["token_strs"] is None


def test_an_empty_text_has_no_tokens_and_the_reverse(server):
    assert tokens(server, prompt="") == []
    assert server.post("/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_special_tokens_are_spelled_out(server):
    assert server.post("/detokenize", {"tokens": [*b"a", EOS]}).json == {"prompt": "a<eos>"}


def test_a_chat_has_the_tokens_that_a_completion_of_it_reports(server):
    ids = tokens(server, messages=HI)
    assert len(ids) == server.chat("hi").json["usage"]["prompt_tokens"]
    assert tokens(server, messages=HI, add_generation_prompt=False) == ids[:-1]


def test_bos_comes_where_the_model_wants_it_unless_told_otherwise():
    tokenizer = Tokenizer(
        spec_of(sentencepiece(dummy_prefix=True), add_bos=True, chat_template=TEMPLATE),
        vocab_size=320,  # room for its special tokens; the toy worker sees none of these
    )
    with running_server(tokenizer=tokenizer) as server:
        with_bos = tokens(server, prompt="tea")
        assert tokens(server, prompt="tea", add_special_tokens=False) == with_bos[1:]
        assert with_bos[0] == tokenizer.encode("<s>", param="prompt")[-1]
        assert tokens(server, messages=HI)[0] == with_bos[0]


def test_the_template_s_own_arguments_reach_it():
    tokenizer = Tokenizer(spec_of(byte_level(), chat_template=TEMPLATE), vocab_size=VOCAB_SIZE)
    with running_server(tokenizer=tokenizer) as server:
        shouted = tokens(server, messages=HI, chat_template_kwargs={"shout": True})
        assert tokenizer.decode(shouted) == "hi|!"


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": HI}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": [1]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "alien", "content": "a"}]}, "messages"),
        ({"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"prompt": "a", "max_tokens": 3}, "max_tokens"),
        ({"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
    ],
)
def test_what_has_no_tokens_is_refused(server, body, param):
    refusal(server.post("/tokenize", body), param)


@pytest.mark.parametrize(
    "ids", [None, "1", [VOCAB_SIZE], [-1], [4294967294], [2**63], [1.0], [True], [[1]], ["7"]]
)
def test_ids_the_model_lacks_have_no_text(server, ids):
    refusal(server.post("/detokenize", {"tokens": ids}), "tokens")
    refusal(server.post("/detokenize", {}), "tokens")


def test_too_many_ids_at_once_are_refused(server, monkeypatch):
    monkeypatch.setattr(tokenization, "MAX_DETOKENIZED", 3)
    assert server.post("/detokenize", {"tokens": [97] * 3}).json == {"prompt": "aaa"}
    assert "4 ids" in refusal(server.post("/detokenize", {"tokens": [97] * 4}), "tokens")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_bodies_are_read_as_strictly_as_elsewhere(server, path):
    assert server.post(path, b"").status == 400
    assert server.post(path, b"[" * 100_000).status == 400
    assert server.post(path, b'{"model":"other"}').status == 404
    assert server.post(path, b"{}", **{"Content-Type": "text/plain"}).status == 400
    assert server.request("GET", path).status == 405


def test_a_fault_in_the_tokenizer_is_an_error_of_the_server(server):
    reply = server.post("/detokenize", {"tokens": [BROKEN]})
    assert (reply.status, reply.error["type"]) == (500, "server_error")


def test_a_model_without_a_tokenizer_has_no_words():
    with running_server(tokenizer=None) as server:
        refusal(server.post("/tokenize", {"prompt": "a"}))
        assert server.post("/detokenize", {"tokens": [5, 6]}).json == {"prompt": "5 6 "}


def test_texts_wait_for_each_other_and_too_many_are_turned_away(monkeypatch):
    gate = threading.Event()

    class Slow(ToyTokenizer):
        most = now = 0

        def encode_prompt(self, text):
            if text != "wait":
                return super().encode_prompt(text)
            self.now += 1
            self.most = max(self.most, self.now)
            assert gate.wait(10)
            self.now -= 1
            return [1]

    monkeypatch.setattr(tokenization, "MAX_WAITING", 3)
    slow = Slow()
    with running_server(tokenizer=slow) as server:
        body = json.dumps({"prompt": "wait"}).encode()
        replies = []
        threads = [
            threading.Thread(target=lambda: replies.append(server.post("/tokenize", body)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert server.becomes(lambda: server.service.num_tokenizing == 3)
        assert server.chat("hi").text() == "hi>"  # who generates waits for none of them
        refused = server.post("/tokenize", body)
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        gate.set()
        for thread in threads:
            thread.join()
        assert [reply.status for reply in replies] == [200] * 3
        assert slow.most == 1
