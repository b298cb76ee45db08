"""The two catalogue models' own tokenizers: every reference text and id, and every token."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import pytest
from fixture_files import FIXTURES
from tokenizers import Tokenizer as HubTokenizer

from jaxserve.errors import RequestError
from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Golden:
    """One model's tokenizer beside what another implementation made of the same model."""

    tokenizer: Tokenizer
    reference: HubTokenizer
    data: dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[("smollm2", "smollm2-135m-instruct"), ("gemma3_270m", "gemma-3-270m")],
    ids=["smollm2", "gemma3_270m"],
)
def golden(request: pytest.FixtureRequest) -> Golden:
    fixture, name = request.param
    checkpoint = request.getfixturevalue(fixture)
    return Golden(
        Tokenizer(checkpoint.tokenizer, vocab_size=checkpoint.config.vocab_size),
        HubTokenizer.from_str(checkpoint.tokenizer.tokenizer_json),
        json.loads((FIXTURES / f"{name}.golden.json").read_text(encoding="utf-8")),
    )


def streamed(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int]) -> str:
    text = tokenizer.detokenizer(prompt_ids)
    return "".join([*map(text.push, ids), text.flush()])


def test_prompts_have_the_reference_ids(golden):
    for completion in golden.data["completions"]:
        assert golden.tokenizer.encode_prompt(completion["prompt"]) == completion["prompt_ids"]


def test_conversations_have_the_reference_text_and_ids(golden):
    for chat in golden.data["chats"]:
        assert golden.tokenizer.render_chat(chat["messages"]) == chat["rendered"]
        assert golden.tokenizer.encode_chat(chat["messages"]) == chat["prompt_ids"]


def test_only_the_instruct_model_has_conversations(golden):
    assert golden.tokenizer.has_chat_template == bool(golden.data["chats"])
    if not golden.tokenizer.has_chat_template:
        with pytest.raises(RequestError, match="use /v1/completions"):
            golden.tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_reference_outputs_stream_to_the_text_they_add_to_their_prompts(golden):
    for run in [*golden.data["completions"], *golden.data["chats"]]:
        output = [step["token"] for step in run["greedy"]]
        before = golden.reference.decode(run["prompt_ids"])
        both = golden.reference.decode(run["prompt_ids"] + output)
        assert before + streamed(golden.tokenizer, run["prompt_ids"], output) == both


def test_random_ids_decode_as_in_the_tokenizers_library(golden):
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(golden.tokenizer.vocab_size) for _ in range(40)]
        assert golden.tokenizer.decode(ids) == golden.reference.decode(ids)
        assert streamed(golden.tokenizer, [], ids) == golden.reference.decode(ids)


def test_every_token_alone_decodes_as_in_the_tokenizers_library(golden):
    every = range(golden.tokenizer.vocab_size)
    ours = [golden.tokenizer.decode([i], skip_special_tokens=False) for i in every]
    assert ours == golden.reference.decode_batch([[i] for i in every], skip_special_tokens=False)


@pytest.mark.parametrize(
    "text", [" tea", "  - item", "\t\n  x", "東京タワー 🫖 ž 👋🏽", "<|im_start|>no<end_of_turn>"]
)
def test_text_survives_encoding_and_streaming(golden, text):
    ids = golden.reference.encode(text, add_special_tokens=False).ids
    shown = golden.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == text
    prompt = golden.tokenizer.encode_prompt("Order:")
    stream = golden.tokenizer.detokenizer(prompt, skip_special_tokens=False)
    assert "".join([*map(stream.push, ids), stream.flush()]) == text
