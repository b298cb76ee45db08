"""What the toy worker's model looks like to the server: sizes, and a tokenizer of bytes."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence, Set

from toy_worker import EOS, VOCAB_SIZE

from checkpoints.model_config import LayerConfig, ModelConfig, Rope
from jaxserve.errors import RequestError

MODEL_NAME = "toy/echo"
MAX_CONTEXT = 64

PIECES = {257: b"LM", 258: b"OP", 259: b" tea", 260: b"  ", 261: b"\xf0\x9f", 262: b"MNO"}

BROKEN = 298  # not one of the toy worker's own signals
"""A token the toy tokenizer fails on."""

MODEL = ModelConfig(
    family="llama",
    vocab_size=VOCAB_SIZE,
    width=8,
    mlp_width=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    layers=(LayerConfig(None, Rope()),),
    norm_eps=1e-5,
    activation="silu",
    tied_head=True,
    qkv_bias=False,
    qk_norm=False,
    sandwich_norm=False,
    embed_scale=1.0,
    attention_scale=1.0,
    final_softcap=None,
    max_context=MAX_CONTEXT,
    bos_id=None,
    eos_ids=(EOS,),
)


class ToyTokenizer:
    """Bytes 0 to 255, EOS, and a few pieces. Text is encoded byte by byte."""

    chat_template = ""
    template_variables: frozenset[str] = frozenset()

    def encode(self, text: str, *, param: str) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_arguments: Mapping[str, object] | None = None,
    ) -> list[int]:
        if [m["role"] for m in messages].count("system") > 1:
            raise RequestError("only one system message, please", param="messages")
        text = "".join(message["content"] for message in messages)
        return list(text.encode()) + [ord(">")] * add_generation_prompt

    def token_id(self, name: str) -> int | None:
        return None

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return PIECES.get(token_id, b"<eos>" if token_id == EOS else b"")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = self.detokenizer((), skip_special_tokens=skip_special_tokens)
        return "".join(map(text.push, ids)) + text.flush()

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown: Set[str] = frozenset(),
    ) -> ToyDetokenizer:
        return ToyDetokenizer(self, skip_special_tokens)


class ToyDetokenizer:
    def __init__(self, tokenizer: ToyTokenizer, skip_special_tokens: bool) -> None:
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id == BROKEN:
            raise KeyError("the toy tokenizer has a bug")
        if token_id == EOS and self.skip:
            return ""
        return self.decoder.decode(self.tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self.decoder.decode(b"", final=True)
