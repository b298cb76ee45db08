"""Fields of the OpenAI and vLLM APIs that are known here and not supported.

Clients send many of them with values that ask for nothing. Those are accepted. Any other value
is refused: an answer that quietly ignores half of the question is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from jaxserve.errors import RequestError

NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        # Sampling.
        "length_penalty": (1,),
        "logits_processors": ([],),
        "use_beam_search": (False,),
        "early_stopping": (False,),
        "typical_p": (1,),
        "thinking_token_budget": (),
        # Form of the answer.
        "suffix": ("",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "verbosity": ("medium",),
        "spaces_between_special_tokens": (True,),
        "return_tokens_as_token_ids": (False,),
        "detokenize": (True,),
        "echo": (False,),
        # Tools.
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        # Prompt.
        "add_special_tokens": (),
        "continue_final_message": (False,),
        "chat_template": (),
        "documents": ([],),
        "prompt_embeds": (),
        "mm_processor_kwargs": ({},),
        "web_search_options": (),
        "reasoning_effort": (),
        "include_reasoning": (True, False),
        # Service.
        "best_of": (),
        "store": (False,),
        "metadata": ({},),
        "moderation": (),
        "safety_identifier": ("",),
        "prompt_cache_key": ("",),
        "prompt_cache_retention": (),
        "request_id": (),
        "kv_transfer_params": (),
        "vllm_xargs": ({},),
    }
)
"""Name of the field -> values that change nothing. null is neutral for all of them."""
SUCCESSORS = MappingProxyType({"functions": "tools", "function_call": "tool_choice"})
"""What to send in place of a deprecated field."""


def drop_neutral(
    fields: dict[str, msgspec.Raw], honoured: tuple[str, ...]
) -> dict[str, msgspec.Raw]:
    """The fields that matter.

    Args:
        fields: the body, one raw value per name.
        honoured: names this endpoint acts on itself (echo is for completions only).

    Raises:
        RequestError: a known, unsupported field asks for something.
    """
    kept = {}
    for name, raw in fields.items():
        if name in honoured or name not in NEUTRAL:
            kept[name] = raw
        elif not is_neutral(msgspec.json.decode(raw), NEUTRAL[name]):
            raise RequestError(unsupported(name, bytes(raw)), param=name)
    return kept


def is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """True for null and the listed values. `false` is no number here, unlike in Python."""
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
    )


def unsupported(name: str, raw: bytes) -> str:
    """The refusal, with the start of the value."""
    shown = raw[:40].decode("utf-8", "replace") + ("..." if len(raw) > 40 else "")
    accepted = " or ".join(msgspec.json.encode(value).decode() for value in NEUTRAL[name])
    remedy = f"leave it out or send {accepted}" if accepted else "leave it out"
    if name in SUCCESSORS:
        remedy = f"send {SUCCESSORS[name]} to /v1/chat/completions"
    return f"{name} is not supported (found {shown}): {remedy}"
