"""Log-probabilities in OpenAI's two formats. Every number is finite: JSON has no infinity."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.request import PromptLogprob
from jaxserve.server.choice import ScoredToken
from jaxserve.server.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    PromptToken,
    TokenLogprob,
    TopLogprob,
)
from jaxserve.server.text import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, as OpenAI has it."""


def finite(logprob: float | None) -> float:
    """The number, or LOWEST_LOGPROB for one that JSON cannot carry."""
    if logprob is None or not logprob > LOWEST_LOGPROB:  # NaN compares false
        return LOWEST_LOGPROB
    return min(logprob, 0.0)


def token_text(token_bytes: bytes) -> str:
    """A token as text. Part of a character is spelled out, so that no two tokens look alike."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def completion_logprobs(
    scored: Sequence[ScoredToken], tokenizer: Tokenizer, top: int
) -> CompletionLogprobs:
    """The older format: `top` alternatives per token, plus the chosen one if missing; null for the
    first token of a prompt, before which there is nothing."""
    tokens = [token_text(tokenizer.token_bytes(_chosen(item)[0])) for item in scored]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[
            None if item.event.logprob is None else _chosen(item)[1] for item in scored
        ],
        top_logprobs=[
            None
            if item.event.logprob is None
            else _by_text([*item.event.top_logprobs[:top], _chosen(item)], tokenizer)
            for item in scored
        ],
        text_offset=[item.offset for item in scored],
    )


def chat_logprobs(scored: Sequence[ScoredToken], tokenizer: Tokenizer, top: int) -> ChatLogprobs:
    """The newer format: exactly `top` alternatives per token."""
    content = []
    for item in scored:
        own = _with_bytes(*_chosen(item), tokenizer)
        others = [
            _with_bytes(token_id, logprob, tokenizer)
            for token_id, logprob in item.event.top_logprobs[:top]
        ]
        content.append(TokenLogprob(own.token, own.logprob, own.bytes, others))
    return ChatLogprobs(content)


def prompt_logprobs(
    ids: Sequence[int], scores: Sequence[PromptLogprob], tokenizer: Tokenizer, top: int
) -> PromptLogprobs:
    """Of a prompt: `top` alternatives in every place, plus the token itself."""
    found: PromptLogprobs = [None]
    for token_id, score in zip(ids[1:], scores, strict=True):
        ranks = {other: rank for rank, (other, _) in enumerate(score.top_logprobs, 1)}
        known = dict(score.top_logprobs[:top]) | {token_id: score.logprob}
        found.append(
            {
                str(other): PromptToken(
                    finite(logprob), ranks.get(other), token_text(tokenizer.token_bytes(other))
                )
                for other, logprob in known.items()
            }
        )
    return found


def _chosen(item: ScoredToken) -> tuple[int, float]:
    assert item.event.token_id is not None  # Choice scores tokens only
    return item.event.token_id, finite(item.event.logprob)


def _with_bytes(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TopLogprob(token_text(raw), finite(logprob), list(raw))


def _by_text(pairs: Sequence[tuple[int, float]], tokenizer: Tokenizer) -> dict[str, float]:
    texts: dict[str, float] = {}
    for token_id, logprob in dict(pairs).items():
        text = token_text(tokenizer.token_bytes(token_id))
        if text in texts:  # two tokens with one spelling must not become one entry
            text = f"token_id:{token_id}"
        texts[text] = finite(logprob)
    return texts
