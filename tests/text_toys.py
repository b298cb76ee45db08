"""Small tokenizers of the two kinds in use, built here and complete enough for every byte."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HubTokenizer

from checkpoints.model_config import TokenizerSpec

BOS, EOS = "<s>", "</s>"
WORDS = ["he", "ll", "hell", "hello", "ort", "東", "ž", "- "]


def _merged(alphabet: list[str], words: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A BPE vocabulary that has every prefix of `words`, joined left to right."""
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    return vocab, merges


def byte_level() -> HubTokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [spell.pre_tokenize_str(word)[0][0] for word in [*WORDS, " hello", "  ", "\n\n"]]
    vocab, merges = _merged(alphabet, words)
    tokenizer = HubTokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer)
    return tokenizer


def bytes_and(*special_tokens: str) -> HubTokenizer:
    """Byte-level without merges: a token for each byte, then EOS, then these."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    tokenizer = HubTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, *special_tokens])
    return tokenizer


def sentencepiece(*, dummy_prefix: bool) -> HubTokenizer:
    """BPE with byte fallback as converted from SentencePiece: Llama 2 (dummy prefix), Gemma."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz-東ž:,."]
    words = [word.replace(" ", "▁") for word in [*WORDS, " hello", "  ", "   "]]
    vocab, merges = _merged([*byte_tokens, *letters], words)
    tokenizer = HubTokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True)
    )
    replace = [normalizers.Replace(" ", "▁")]
    prepend = [normalizers.Prepend("▁")] if dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, *replace])
    strip = [decoders.Strip(" ", 1, 0)] if dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_special_tokens(tokenizer)
    return tokenizer


def metaspace() -> HubTokenizer:
    """The other spelling of SentencePiece: Metaspace puts the dummy prefix there and back."""
    vocab, merges = _merged(["▁", *"abcdefghijklmnopqrstuvwxyz"], ["▁hello", "he", "ort"])
    tokenizer = HubTokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _add_special_tokens(tokenizer)
    return tokenizer


def spec_of(
    tokenizer: HubTokenizer, *, add_bos: bool = False, chat_template: str | None = None
) -> TokenizerSpec:
    return TokenizerSpec(
        tokenizer_json=tokenizer.to_str(),
        add_bos=add_bos,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=chat_template,
        special_tokens=(("pad_token", "<pad>"),),
    )


def _add_special_tokens(tokenizer: HubTokenizer) -> None:
    tokenizer.add_special_tokens([BOS, EOS, "<pad>", "<\uff5cend▁of▁turn\uff5c>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("a b", special=False)])
