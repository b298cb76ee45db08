"""The tokenizer in a GGUF file -> TokenizerSpec, in the JSON of the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.gguf_metadata import Metadata
from checkpoints.model_config import TokenizerSpec
from checkpoints.pre_tokenizers import WORD_CUTS, WordCut, byte_level

_SPACE = "\u2581"  # SentencePiece writes a space as this


class _TokenType(IntEnum):
    """What `tokenizer.ggml.token_type` says of a token. Those missing here are plain."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def read_gguf_tokenizer(metadata: Metadata) -> TokenizerSpec | None:
    """Build the tokenizer; None for a file without one.

    Raises:
        CheckpointError: a kind of tokenizer, or of cutting text, that is not known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return None
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if kind == "gpt2":
        cut = _word_cut(metadata)
        pipeline, default_bos = _byte_level_bpe(metadata, tokens, cut), cut.add_bos
    elif kind == "llama":
        pipeline, default_bos = _sentencepiece_bpe(metadata, tokens, types), True
    else:
        raise CheckpointError(
            "tokenizer that is not supported",
            file=metadata.file,
            expected="tokenizer.ggml.model gpt2 or llama",
            found=repr(kind),
        )
    added = _added_tokens(tokens, types)
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    bos_token = _token(metadata, tokens, "bos")
    others = (("pad_token", "padding"), ("unk_token", "unknown"))
    named = ((name, _token(metadata, tokens, key)) for name, key in others)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", default_bos)
    return TokenizerSpec(
        tokenizer_json=json.dumps(tokenizer | pipeline, ensure_ascii=False),
        add_bos=bool(add_bos) and bos_token is not None,
        bos_token=bos_token,
        eos_token=_token(metadata, tokens, "eos"),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=tuple((name, text) for name, text in named if text is not None),
        tool_template=metadata.get("tokenizer.chat_template.tool_use"),
    )


def _token(metadata: Metadata, tokens: Sequence[str], key: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return None if token_id is None or token_id >= len(tokens) else tokens[token_id]


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are found in text before anything else is done with it."""
    special = (_TokenType.CONTROL, _TokenType.UNKNOWN)
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in special or kind == _TokenType.USER_DEFINED
    ]


def _word_cut(metadata: Metadata) -> WordCut:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in WORD_CUTS:
        raise CheckpointError(
            "way of cutting text into words that is not known",
            file=metadata.file,
            expected="tokenizer.ggml.pre one of " + ", ".join(WORD_CUTS),
            found=repr(name),
            remedy="Guessing would give other tokens than the model was trained on.",
        )
    return WORD_CUTS[name]


def _model(vocab: dict[str, int], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return model | settings | {"vocab": vocab, "merges": merges}


def _byte_level_bpe(metadata: Metadata, tokens: list[str], cut: WordCut) -> dict[str, Any]:
    # Byte-level tokens have no spaces in them, so the one in a merge separates its halves.
    merges = [merge.split(" ", 1) for merge in metadata.require("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    return {
        "normalizer": {"type": "NFC"} if cut.normalise_nfc else None,
        "pre_tokenizer": byte_level(cut),
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "model": _model(vocab, merges, ignore_merges=cut.ignore_merges),
    }


def _sentencepiece_bpe(metadata: Metadata, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores: list[float] = metadata.require("tokenizer.ggml.scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    replace_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizer: dict[str, Any] = replace_spaces
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        prepend = {"type": "Prepend", "prepend": _SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prepend, replace_spaces]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _token(metadata, tokens, "unknown")
    merges = _merges_from_scores(tokens, types, scores)
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[list[str]]:
    """Rebuild the merges of a SentencePiece BPE vocabulary, best first.

    SentencePiece joins the two neighbours whose joint is the token of the highest score, so every
    way of cutting a token in two tokens is a merge, with the token's score as its rank. The sort
    is stable: cuts of one token keep their order, which decides nothing.
    """
    plain = (1, _TokenType.USER_DEFINED)
    mergeable = {token for token, kind in zip(tokens, types, strict=True) if kind in plain}
    merges: list[tuple[float, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token not in mergeable:
            continue
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in mergeable and right in mergeable:
                merges.append((score, left, right))
    merges.sort(key=lambda merge: -merge[0])
    return [[left, right] for _, left, right in merges]
