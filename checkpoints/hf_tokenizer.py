"""The tokenizer of a Hugging Face folder -> TokenizerSpec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.model_config import TokenizerSpec
from checkpoints.tensor_files import read_json

_OTHER_SPECIAL_TOKENS = ("pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def read_hf_tokenizer(folder: Path) -> TokenizerSpec | None:
    """Read tokenizer.json and what stands around it; None for a folder without one.

    Raises:
        CheckpointError: a file that is damaged or holds something else.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    tokenizer = read_json(file)
    config = _optional_json(folder / "special_tokens_map.json")
    config |= _optional_json(folder / "tokenizer_config.json")
    kept, added = _split_post_processor(tokenizer.get("post_processor"))
    tokenizer["post_processor"] = kept

    bos_token = _token_text(config.get("bos_token"))
    starts_with_bos = bool(added) and bos_token in (None, added[0])
    if starts_with_bos:
        bos_token = added[0]
    # transformers lets an explicit add_bos_token override the post-processor.
    add_bos = config.get("add_bos_token")
    chat_template, tool_template = _chat_templates(folder, config)
    others = ((name, _token_text(config.get(name))) for name in _OTHER_SPECIAL_TOKENS)
    return TokenizerSpec(
        tokenizer_json=json.dumps(tokenizer, ensure_ascii=False),
        add_bos=bos_token is not None and (starts_with_bos if add_bos is None else bool(add_bos)),
        bos_token=bos_token,
        eos_token=_token_text(config.get("eos_token")),
        chat_template=chat_template,
        special_tokens=tuple((name, text) for name, text in others if text is not None),
        tool_template=tool_template,
    )


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _token_text(value: Any) -> str | None:
    """A token is written as its text, or as an object with the text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _split_post_processor(block: dict[str, Any] | None) -> tuple[dict[str, Any] | None, list[str]]:
    """What to keep of a post-processor, and the special tokens the rest puts before a text.

    Byte-level steps only adjust offsets and stay. Everything else exists to add special tokens.
    """
    if block is None:
        return None, []
    kind = block.get("type")
    if kind == "ByteLevel":
        return block, []
    if kind == "Sequence":
        parts = [_split_post_processor(part) for part in block["processors"]]
        kept = [part for part, _ in parts if part is not None]
        added = [token for _, tokens in parts for token in tokens]
        return ({"type": "Sequence", "processors": kept} if kept else None), added
    if kind == "TemplateProcessing":
        return None, _tokens_before_text(block)
    return None, [block["cls"][0]] if "cls" in block else []


def _tokens_before_text(block: dict[str, Any]) -> list[str]:
    tokens: list[str] = []
    for piece in block["single"]:
        if "SpecialToken" not in piece:
            break
        name = piece["SpecialToken"]["id"]
        tokens += block["special_tokens"].get(name, {}).get("tokens", [name])
    return tokens


def _chat_templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The usual template and the one for tools. Files come first, as in transformers."""
    usual = folder / "chat_template.jinja"
    if usual.exists():
        tools = folder / "additional_chat_templates" / "tool_use.jinja"
        return _optional_text(usual), _optional_text(tools)
    separate = _optional_json(folder / "chat_template.json")
    template = separate.get("chat_template", config.get("chat_template"))
    named = {"default": template}
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
    for found in (named.get("default"), named.get("tool_use")):
        if found is not None and not isinstance(found, str):
            raise CheckpointError(
                "chat_template",
                file=folder,
                expected="a string, or a list of named templates",
                found=type(found).__name__,
            )
    return named.get("default"), named.get("tool_use")


def _optional_text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.exists() else None
