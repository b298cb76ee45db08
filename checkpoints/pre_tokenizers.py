"""How byte-level BPE tokenizers cut text into words, by the name a GGUF file gives the cut.

To add one: its regular expressions from the model's tokenizer.json, and a golden test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class WordCut:
    """One published way of cutting text before merges are applied.

    Attributes:
        patterns: applied in turn; each match becomes a piece of its own.
        normalise_nfc: text is brought to Unicode NFC first.
        ignore_merges: a word that is a token is taken whole, whatever the merges say.
        add_bos: prompts start with BOS where the file does not say.
    """

    patterns: tuple[str, ...]
    normalise_nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_DIGITS
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_DIGITS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2_CUT = WordCut((_GPT2,))
_DIGITS_CUT = WordCut((r"\p{N}", _GPT2))
_LLAMA3_CUT = WordCut((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_CUT = WordCut((_QWEN2,), normalise_nfc=True)

WORD_CUTS: Mapping[str, WordCut] = {
    "default": WordCut(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]")
    ),
    "gpt-2": _GPT2_CUT,
    "smollm": _DIGITS_CUT,
    "starcoder": _DIGITS_CUT,
    "refact": _DIGITS_CUT,
    "llama-bpe": _LLAMA3_CUT,
    "llama3": _LLAMA3_CUT,
    "llama-v3": _LLAMA3_CUT,
    "qwen2": _QWEN2_CUT,
    "deepseek-r1-qwen": replace(_QWEN2_CUT, normalise_nfc=False, add_bos=True),
    "tekken": WordCut((_TEKKEN,), ignore_merges=True, add_bos=True),
}


def byte_level(cut: WordCut) -> dict[str, Any]:
    """The cut as a pre-tokenizer in the JSON of the `tokenizers` library."""
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in cut.patterns
    ]
    to_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}
