"""Tokenizers out of GGUF files and folders: the ids that the model was trained on."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from checkpoint_toys import write_gguf
from fixture_files import FIXTURES
from tokenizers import Tokenizer

from checkpoints import CheckpointError
from checkpoints.gguf_metadata import Metadata
from checkpoints.gguf_tokenizer import read_gguf_tokenizer
from checkpoints.hf_tokenizer import read_hf_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


tokenizer_of = functools.cache(lambda spec: Tokenizer.from_str(spec.tokenizer_json))


def encode(spec, text, *, add_bos=False):
    tokenizer = tokenizer_of(spec)
    ids = tokenizer.encode(text).ids
    return [tokenizer.token_to_id(spec.bos_token), *ids] if add_bos and spec.add_bos else ids


def assert_reproduces_golden_ids(spec, name):
    golden = json.loads((FIXTURES / f"{name}.golden.json").read_text())
    assert golden["completions"]
    for case in golden["completions"]:
        assert encode(spec, case["prompt"], add_bos=True) == case["prompt_ids"]
    for case in golden["chats"]:
        assert encode(spec, case["rendered"]) == case["prompt_ids"]


def test_smollm2_ids_are_those_of_another_implementation(smollm2):
    spec = smollm2.tokenizer
    assert_reproduces_golden_ids(spec, "smollm2-135m-instruct")
    assert (spec.add_bos, spec.bos_token, spec.eos_token) == (
        False,
        "<|im_start|>",
        "<|im_end|>",
    )
    assert "<|im_start|>assistant" in spec.chat_template


def test_gemma_ids_are_those_of_another_implementation(gemma3_270m):
    spec = gemma3_270m.tokenizer
    assert_reproduces_golden_ids(spec, "gemma-3-270m")
    assert (spec.add_bos, spec.bos_token, spec.chat_template) == (True, "<bos>", None)


@pytest.mark.parametrize(
    "text", ["  two spaces", "tab\tnew\n\n\nlines", "東京 🗼 e\u0301", "a" * 300]
)
def test_text_survives_encoding_and_decoding(smollm2, gemma3_270m, text):
    for checkpoint in (smollm2, gemma3_270m):
        tokenizer = tokenizer_of(checkpoint.tokenizer)
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def sentencepiece(**changes):
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xC3>", "<0xA9>"]
    types = [UNKNOWN, CONTROL, CONTROL, BYTE, BYTE, BYTE]
    pieces = ["\u2581", "a", "b", "c", "ab", "bc", "abc", "\u2581a", "\u2581ab"]
    scores = [0.0] * 6 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -5.0, -4.0]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + pieces,
        "tokenizer.ggml.token_type": types + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return read_gguf_tokenizer(Metadata(Path("m.gguf"), values | changes))


def pieces_of(spec, text):
    return tokenizer_of(spec).encode(text).tokens


def test_sentencepiece_merges_the_pair_of_the_best_score_first():
    spec = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    assert pieces_of(spec, "abc") == ["abc"]  # by way of bc, which beats ab
    assert pieces_of(spec, "ab") == ["ab"]
    assert pieces_of(spec, "b ab") == ["b", "\u2581ab"]


def test_sentencepiece_puts_a_space_before_text_unless_told_not_to():
    assert pieces_of(sentencepiece(), "ab") == ["\u2581ab"]
    spec = sentencepiece()
    tokenizer = tokenizer_of(spec)
    assert tokenizer.decode(tokenizer.encode("ab a").ids) == "ab a"


def test_sentencepiece_falls_back_to_bytes_then_to_unknown():
    spec = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    assert pieces_of(spec, "é\n") == ["<0xC3>", "<0xA9>", "<0x0A>"]
    assert pieces_of(spec, "z") == ["<unk>"]


def test_sentencepiece_files_mean_bos_unless_they_say_otherwise():
    assert sentencepiece().add_bos
    assert not sentencepiece(**{"tokenizer.ggml.add_bos_token": False}).add_bos


def test_special_tokens_in_text_are_found_and_bos_is_never_added_by_itself():
    spec = sentencepiece()
    assert encode(spec, "<s>")[0] == 1
    assert encode(spec, "a")[0] != 1


def test_a_gguf_file_may_have_a_template_for_tools():
    templates = {"tokenizer.chat_template": "usual", "tokenizer.chat_template.tool_use": "tools"}
    spec = sentencepiece(**templates)
    assert (spec.chat_template, spec.tool_template) == ("usual", "tools")


def byte_level(**changes):
    tokens = ["<|end|>", "1", "2", "a", "b", "Ġ", "12", "ab", "Ġa", "Ġab", "12ab", "<tool>"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] + [NORMAL] * 10 + [USER_DEFINED],
        "tokenizer.ggml.merges": ["1 2", "a b", "Ġ a", "Ġ ab"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
    }
    return read_gguf_tokenizer(Metadata(Path("m.gguf"), values | changes))


@pytest.mark.parametrize(
    "name, pieces",
    [
        ("gpt-2", ["12", "Ġab"]),
        ("smollm", ["1", "2", "Ġab"]),
        ("qwen2", ["1", "2", "Ġab"]),
        ("llama-bpe", ["12", "Ġab"]),
        ("default", ["12", "Ġab"]),
        ("tekken", ["1", "2", "Ġab"]),
    ],
)
def test_words_are_cut_as_the_file_says(name, pieces):
    assert pieces_of(byte_level(**{"tokenizer.ggml.pre": name}), "12 ab") == pieces


def test_an_unknown_cut_is_refused_with_the_known_ones():
    with pytest.raises(CheckpointError) as refusal:
        byte_level(**{"tokenizer.ggml.pre": "klingon"})
    for word in ("m.gguf", "klingon", "llama-bpe", "smollm"):
        assert word in str(refusal.value)


def test_llama3_files_mean_bos_and_gpt2_files_do_not():
    assert byte_level(**{"tokenizer.ggml.pre": "llama-bpe"}).add_bos
    assert not byte_level().add_bos


def test_user_defined_tokens_are_found_in_text_and_kept_in_output():
    tokenizer = Tokenizer.from_str(byte_level().tokenizer_json)
    ids = tokenizer.encode("a<tool><|end|>b").ids
    assert ids == [3, 11, 0, 4]
    assert tokenizer.decode(ids) == "a<tool>b"


def test_a_file_without_a_tokenizer_serves_token_ids_only(tiny, tmp_path):
    from checkpoints.gguf_file import open_gguf

    assert (
        open_gguf(write_gguf(tmp_path / "m.gguf", "llama", tiny / "llama-tied")).tokenizer is None
    )


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def hf_folder(path: Path, *, post_processor=None, config=None, files=()):
    content = json.loads(byte_level().tokenizer_json) | {"post_processor": post_processor}
    (path / "tokenizer.json").write_text(json.dumps(content))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return read_hf_tokenizer(path)


@pytest.mark.parametrize(
    "post_processor, config, add_bos, kept",
    [
        pytest.param(None, {"bos_token": "<|end|>"}, False, None, id="nothing adds it"),
        pytest.param(TEMPLATE, {}, True, None, id="a template adds it"),
        pytest.param(
            {"type": "Sequence", "processors": [BYTE_LEVEL, TEMPLATE]},
            {"bos_token": {"content": "<|end|>", "lstrip": False}},
            True,
            {"type": "Sequence", "processors": [BYTE_LEVEL]},
            id="a template after a byte-level step",
        ),
        pytest.param(
            TEMPLATE,
            {"bos_token": "<|end|>", "add_bos_token": False},
            False,
            None,
            id="the config says no",
        ),
        pytest.param(
            BYTE_LEVEL,
            {"bos_token": "<|end|>", "add_bos_token": True},
            True,
            BYTE_LEVEL,
            id="the config says yes",
        ),
    ],
)
def test_bos_is_taken_out_of_the_tokenizer_and_told_apart(
    tmp_path, post_processor, config, add_bos, kept
):
    spec = hf_folder(tmp_path, post_processor=post_processor, config=config)
    assert (spec.add_bos, spec.bos_token) == (add_bos, "<|end|>")
    assert json.loads(spec.tokenizer_json)["post_processor"] == kept
    assert encode(spec, "ab") == [7]


@pytest.mark.parametrize(
    "config, files, expected",
    [
        ({}, (), (None, None)),
        ({"chat_template": "plain"}, (), ("plain", None)),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "tools"},
                    {"name": "default", "template": "usual"},
                ]
            },
            (),
            ("usual", "tools"),
        ),
        (
            {"chat_template": "old"},
            [("chat_template.json", '{"chat_template": "new"}')],
            ("new", None),
        ),
        ({"chat_template": "old"}, [("chat_template.jinja", "newest")], ("newest", None)),
        (
            {"chat_template": [{"name": "tool_use", "template": "old"}]},
            [
                ("chat_template.jinja", "newest"),
                ("additional_chat_templates/tool_use.jinja", "tools"),
            ],
            ("newest", "tools"),
        ),
    ],
)
def test_the_chat_template_is_found_wherever_it_is(tmp_path, config, files, expected):
    spec = hf_folder(tmp_path, config=config, files=files)
    assert (spec.chat_template, spec.tool_template) == expected


def test_special_tokens_are_found_in_either_file(tmp_path):
    files = [("special_tokens_map.json", '{"eos_token": "x", "pad_token": {"content": "y"}}')]
    spec = hf_folder(tmp_path, config={"unk_token": "z", "sep_token": None}, files=files)
    assert spec.eos_token == "x"
    assert spec.special_tokens == (("pad_token", "y"), ("unk_token", "z"))


def test_a_damaged_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not valid JSON"):
        read_hf_tokenizer(tmp_path)
