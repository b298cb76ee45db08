"""Text token by token is the one-shot text, whatever the ids: checked against `tokenizers`."""

from __future__ import annotations

from functools import cache

import pytest
import text_toys
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models

from checkpoints.model_config import TokenizerSpec
from jaxserve.errors import ConfigError
from jaxserve.tokenizer import Tokenizer

PADDING = 7
KINDS = ("byte-level", "sentencepiece", "sentencepiece with dummy prefix", "metaspace")
BYTE_KINDS = KINDS[:3]


@cache
def hub(kind: str) -> HubTokenizer:
    match kind:
        case "byte-level":
            return text_toys.byte_level()
        case "metaspace":
            return text_toys.metaspace()
    return text_toys.sentencepiece(dummy_prefix="dummy" in kind)


@cache
def ours(kind: str) -> Tokenizer:
    return Tokenizer(text_toys.spec_of(hub(kind)), vocab_size=hub(kind).get_vocab_size() + PADDING)


def streamed(
    tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int], *, skip_special_tokens: bool = True
) -> str:
    text = tokenizer.detokenizer(prompt_ids, skip_special_tokens=skip_special_tokens)
    return "".join([*map(text.push, ids), text.flush()])


def byte_ids(kind: str, data: bytes) -> list[int]:
    """One token per byte."""
    if kind == "byte-level":
        inverse = {ours(kind).token_bytes(i): i for i in range(256)}
        return [inverse[bytes([byte])] for byte in data]
    return list(data)  # the toy's first 256 tokens are <0x00> to <0xFF>


def longest_ids(kind: str, text: str) -> list[int]:
    """The longest tokens that spell `text`, left to right."""
    spelled = {ours(kind).token_bytes(i): i for i in range(ours(kind).vocab_size)}
    data, ids = text.encode(), []
    while data:
        piece = max(filter(data.startswith, filter(None, spelled)), key=len)
        ids.append(spelled[piece])
        data = data[len(piece) :]
    return ids


@st.composite
def cases(draw, kinds=KINDS, max_ids=24):
    """A kind of vocabulary and ids, weighted towards bytes, spaces and special tokens."""
    kind = draw(st.sampled_from(kinds))
    size = hub(kind).get_vocab_size()
    choices = [st.integers(0, size + PADDING - 1), st.integers(size - 6, size - 1)]
    if kind in BYTE_KINDS:
        spaces = [i for i in range(size) if ours(kind).token_bytes(i).startswith(b" ")]
        characters = st.text("a é東🫖👋🏽\ufffd", min_size=1, max_size=3)
        choices += [st.sampled_from(spaces), characters.map(lambda s: byte_ids(kind, s.encode()))]
    runs = draw(st.lists(st.one_of(choices), max_size=max_ids))
    return kind, [i for run in runs for i in (run if isinstance(run, list) else [run])]


def is_plain(kind: str, ids: list[int], *, skip_special_tokens: bool) -> bool:
    """Whether `tokenizers` defines the same text: see the test below for where it does not."""
    if kind == "byte-level":
        return True
    tokens = [ours(kind).token_bytes(i) for i in ids]
    if skip_special_tokens:
        special = {i for i, t in hub(kind).get_added_tokens_decoder().items() if t.special}
        ids = [i for i in ids if i not in special]
        tokens = [ours(kind).token_bytes(i) for i in ids]
    named = [hub(kind).id_to_token(i) or "" for i in ids]
    if kind == "metaspace":
        # Of the first token it drops every "▁", wherever in it.
        return "▁" not in next(filter(None, named), "")[1:]
    run = b""
    for name, data in [*zip(named, tokens, strict=True), ("end", b"")]:
        if name.startswith("<0x"):
            run += data
        elif name:
            try:
                run.decode()
            except UnicodeDecodeError:
                return False
            run = b""
    return True


@given(cases(), st.booleans())
def test_one_shot_text_is_that_of_the_tokenizers_library(case, skip):
    kind, ids = case
    text = ours(kind).decode(ids, skip_special_tokens=skip)
    if is_plain(kind, ids, skip_special_tokens=skip):
        assert text == hub(kind).decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS[1:3])
def test_a_valid_character_next_to_a_broken_one_is_kept(kind):
    # `tokenizers` replaces all of a run of byte tokens if any of it is broken, which no stream
    # could know in advance. Characters that are whole stay whole here.
    ids = byte_ids(kind, b"A\xff\xe6\x9d\xb1")
    assert hub(kind).decode(ids) == "\ufffd" * 5
    assert ours(kind).decode(ids) == streamed(ours(kind), [], ids) == "A\ufffd東"


@given(cases(), st.booleans())
def test_pushed_one_by_one_the_text_is_the_one_shot_text(case, skip):
    kind, ids = case
    tokenizer = ours(kind)
    data = b"".join(tokenizer.token_bytes(i) for i in ids if not (skip and _is_special(kind, i)))
    if "dummy" in kind or kind == "metaspace":
        data = data.removeprefix(b" ")
    expected = data.decode(errors="replace")
    assert streamed(tokenizer, [], ids, skip_special_tokens=skip) == expected
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@given(cases(), st.integers(0, 24), st.booleans())
def test_a_continuation_is_what_the_output_adds_to_the_text_of_the_prompt(case, where, skip):
    kind, ids = case
    tokenizer = ours(kind)
    prompt, output = ids[:where], ids[where:]
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    both = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    shared = next((n for n, (a, b) in enumerate(zip(before, both, strict=False)) if a != b), None)
    shared = min(len(before), len(both)) if shared is None else shared
    assert streamed(tokenizer, prompt, output, skip_special_tokens=skip) == both[shared:]


@given(cases(kinds=BYTE_KINDS))
def test_what_was_pushed_is_certain_and_only_an_open_character_is_held_back(case):
    kind, ids = case
    text = ours(kind).detokenizer([])
    shown = ""
    for count, token_id in enumerate(ids, 1):
        shown += text.push(token_id)
        now = ours(kind).decode(ids[:count])
        assert now in (shown, shown + "\ufffd")


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("word", ["東京タワー", "🫖", "ž", "👋🏽"])
def test_characters_cut_by_token_limits_stream_as_they_decode(kind, word):
    ids = byte_ids(kind, word.encode())
    for count in range(len(ids) + 1):
        text = ours(kind).detokenizer([])
        pushed = "".join(map(text.push, ids[:count]))
        assert "\ufffd" not in pushed
        assert pushed + text.flush() == ours(kind).decode(ids[:count])
    assert streamed(ours(kind), [], ids) == word


def test_a_space_does_not_flush_an_open_character():
    ids = [*byte_ids("byte-level", b"\xf0\x9f"), *byte_ids("byte-level", b" A")]
    assert streamed(ours("byte-level"), [], ids) == "\ufffd A"


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("output", [" hello", "  - he", "   ", "\t", "\n", " \n hello  hello"])
def test_a_continuation_keeps_every_leading_space(kind, output):
    prompt = ours(kind).encode_prompt("hello:")
    assert streamed(ours(kind), prompt, byte_ids(kind, output.encode())) == output
    assert streamed(ours(kind), prompt, longest_ids(kind, output)) == output


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_encoded_text_streams_back_unchanged(kind):
    text = "hello  hello\n\n" + "".join(map(chr, [*range(0x800), *range(0xFFF0, 0x10010)]))
    ids = ours(kind).encode_prompt(text)
    assert streamed(ours(kind), [], ids) == ours(kind).decode(ids) == text


@pytest.mark.parametrize(
    "prompt, expected",
    [
        pytest.param([], "hello hello", id="nothing before"),
        pytest.param(["<s>"], "hello hello", id="only BOS before"),
        pytest.param(["<s>", "▁"], " hello hello", id="the dummy prefix itself before"),
        pytest.param(["<s>", "▁he"], " hello hello", id="text before"),
    ],
)
def test_a_dummy_prefix_is_dropped_once_and_only_before_any_text(prompt, expected):
    tokenizer = hub("sentencepiece with dummy prefix")
    prompt_ids = [tokenizer.token_to_id(token) for token in prompt]
    ids = [tokenizer.token_to_id("▁hello")] * 2
    assert streamed(ours("sentencepiece with dummy prefix"), prompt_ids, ids) == expected


def test_a_special_token_in_the_middle_of_a_character_does_not_break_it():
    first, *rest = byte_ids("byte-level", "東".encode())
    eos = hub("byte-level").token_to_id(text_toys.EOS)
    assert streamed(ours("byte-level"), [], [first, eos, *rest]) == "東"
    shown = streamed(ours("byte-level"), [], [first, eos, *rest], skip_special_tokens=False)
    assert shown == "\ufffd</s>\ufffd\ufffd"


def test_a_character_begun_by_the_prompt_is_shown_whole_or_not_at_all():
    first, *rest = byte_ids("byte-level", "東".encode())
    letter = byte_ids("byte-level", b"a")
    tokenizer = ours("byte-level")
    assert streamed(tokenizer, [first], rest) == "東"
    assert streamed(tokenizer, [first, rest[0]], rest[1:]) == "東"
    assert streamed(tokenizer, [first], letter) == "a"
    assert streamed(tokenizer, [first], []) == ""


def test_padding_ids_of_the_model_are_no_text():
    tokenizer = ours("byte-level")
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b""
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == ""


@pytest.mark.parametrize("beyond", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(beyond):
    tokenizer = ours("byte-level")
    with pytest.raises(ValueError, match=rf"{beyond} is outside \[0, {tokenizer.vocab_size}\)"):
        tokenizer.detokenizer([]).push(beyond)
    with pytest.raises(ValueError, match="is outside"):
        tokenizer.token_bytes(beyond)


@pytest.mark.parametrize(
    "decoder, named",
    [
        (None, "has no decoder"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]), '"start": 2'),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]), "Replace"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.ByteFallback()]), "ByteLevel"),
    ],
)
def test_a_decoder_whose_pieces_are_not_bytes_is_refused_by_name(decoder, named):
    tokenizer = HubTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    spec = TokenizerSpec(tokenizer.to_str(), False, None, None, None)
    with pytest.raises(ConfigError, match=named):
        Tokenizer(spec, vocab_size=1)


def _is_special(kind: str, token_id: int) -> bool:
    token = hub(kind).get_added_tokens_decoder().get(token_id)
    return token is not None and token.special
