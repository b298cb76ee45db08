"""Token ids to text, one token at a time, by way of bytes. Knows no prompts and no templates.

Every token of the supported vocabularies stands for a fixed run of bytes, and a text is those
runs joined and read as UTF-8. Streaming therefore needs only an incremental UTF-8 decoder: each
token is looked at once, and joining the pieces gives the one-shot text by construction. (The
`tokenizers` library's own `DecodeStream` decodes a sliding window again for every token and
raises an error on bytes that never become a character.)
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from tokenizers import Tokenizer as HubTokenizer

from jaxserve.errors import ConfigError

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ByteRule:
    """How a vocabulary spells bytes.

    Attributes:
        to_bytes: the spelling of a token in the vocabulary -> the bytes it adds to a text.
        dummy_prefix: encoding put a space before the text; decoding drops one again.
    """

    to_bytes: Callable[[str], bytes]
    dummy_prefix: bool = False


class TokenBytes:
    """The bytes of every token id, worked out when an id is first seen.

    A generation touches few ids, so even a vocabulary of 262,144 costs nothing at start-up and
    little memory. Threads may share it: filling an entry twice writes the same bytes.

    Attributes:
        special_ids: tokens that mark structure (BOS, end of turn) rather than text.
        dummy_prefix: see `ByteRule`.
    """

    def __init__(self, tokenizer: HubTokenizer, *, vocab_size: int) -> None:
        """Read the decoder of `tokenizer`.

        Args:
            tokenizer: its decoder says how tokens spell bytes.
            vocab_size: V, at least the tokenizer's own size when the model pads its vocabulary.
                Ids nobody named stand for no bytes.

        Raises:
            ConfigError: the decoder is of an unknown kind.
        """
        rule = read_byte_rule(tokenizer)
        self._tokenizer = tokenizer
        self._to_bytes = rule.to_bytes
        self._bytes: list[bytes | None] = [None] * vocab_size
        self.dummy_prefix = rule.dummy_prefix
        added = tokenizer.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self.special_ids = frozenset(self._special)

    def skipped_ids(self, shown: Set[str]) -> frozenset[int]:
        """The special tokens without those named in `shown`."""
        if not shown:
            return self.special_ids
        return frozenset(i for i, name in self._special.items() if name not in shown)

    def __getitem__(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._bytes):
            raise ValueError(f"token id {token_id} is outside [0, {len(self._bytes)})")
        found = self._bytes[token_id]
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = b"" if token is None else self._to_bytes(token)
            self._bytes[token_id] = found
        return found


class IncrementalDetokenizer:
    """The text of a continuation, token by token.

    Its text is decode(prompt + output) with the beginning it shares with decode(prompt) removed:
    a character whose first bytes are in the prompt is shown whole, and a dummy prefix is dropped
    only when no token of the prompt has any text.
    """

    def __init__(
        self,
        table: TokenBytes,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown: Set[str] = frozenset(),
    ) -> None:
        """Continue `prompt_ids`; `shown` are special tokens that are not skipped in any case."""
        self._table = table
        self._skipped = table.skipped_ids(shown) if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = table.dummy_prefix and not any(map(self._bytes_of, prompt_ids))
        self._decoder.decode(self._last_bytes(prompt_ids))
        self._character_open = bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """Take the next token of the output.

        Returns:
            The text that is certain by now. Empty while a character is incomplete.

        Raises:
            ValueError: the id is not in the vocabulary.
        """
        piece = self._bytes_of(token_id)
        if self._drop_space and piece:
            self._drop_space = False
            piece = piece.removeprefix(b" ")
        return self._without_prompt(self._decoder.decode(piece))

    def flush(self) -> str:
        """The rest of the text at the end of the output: U+FFFD for an incomplete character."""
        return self._without_prompt(self._decoder.decode(b"", final=True))

    def _bytes_of(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._table[token_id]

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        # Three are enough: an incomplete character is at most three bytes of one.
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes_of(token_id) + tail
            if len(tail) >= 3:
                break
        return tail[-3:]

    def _without_prompt(self, text: str) -> str:
        # decode(prompt) ends in U+FFFD for the character the prompt left open. If the output does
        # not complete it, that U+FFFD is the prompt's and must not be shown a second time.
        if self._character_open and text:
            self._character_open = False
            return text.removeprefix(REPLACEMENT)
        return text


def read_byte_rule(tokenizer: HubTokenizer) -> ByteRule:
    """How the decoder of `tokenizer` turns tokens into bytes.

    Known are ByteLevel, and what converted SentencePiece models have: Replace or Metaspace, then
    any of ByteFallback, Fuse and a Strip of one leading space.

    Raises:
        ConfigError: any other decoder. Its pieces may depend on their neighbours, so text could
            not be streamed.
    """
    if tokenizer.decoder is None:
        raise ConfigError("the tokenizer has no decoder; it needs one to turn ids into text")
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
        return ByteRule(_byte_level)
    replaced: dict[str, str] = {}
    dummy_prefix = False
    for index, step in enumerate(steps):
        if not _is_sentencepiece_step(step, fused="Fuse" in kinds[:index]):
            raise ConfigError(
                f"the tokenizer's decoder has the step {json.dumps(step)}; known are ByteLevel, or "
                "Replace, Metaspace, ByteFallback, Fuse and then a Strip of one leading space"
            )
        if step["type"] == "Replace":
            replaced[step["pattern"]["String"]] = step["content"]
        elif step["type"] == "Metaspace":
            replaced[step["replacement"]] = " "
        dummy_prefix |= step["type"] == "Strip" or step.get("prepend_scheme", "never") != "never"
    return ByteRule(_sentencepiece(replaced, byte_fallback="ByteFallback" in kinds), dummy_prefix)


def _is_sentencepiece_step(step: Mapping[str, object], *, fused: bool) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": str()}}:
            return not fused
        case {"type": "Metaspace" | "ByteFallback"}:
            return not fused
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            return fused
        case {"type": "Fuse"}:
            return True
    return False


def _sentencepiece(replaced: Mapping[str, str], *, byte_fallback: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        for written, meant in replaced.items():
            token = token.replace(written, meant)
        return token.encode()

    return to_bytes


def _byte_alphabet() -> dict[str, int]:
    # GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other bytes in order
    # for the characters from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER: Mapping[str, int] = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()  # an added token: its text stands for itself
