"""An answer in one piece."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from jaxserve.server.calls import whole_calls
from jaxserve.server.choice import Delta
from jaxserve.server.generation import Generation
from jaxserve.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from jaxserve.server.replies import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    PromptLogprobs,
    Usage,
)
from jaxserve.server.text import Tokenizer


def join(deltas: Sequence[Delta]) -> Delta:
    """All of a choice's pieces as one."""
    return Delta(
        text="".join(delta.text for delta in deltas),
        scored=tuple(token for delta in deltas for token in delta.scored),
        finish_reason=deltas[-1].finish_reason,
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=tuple(piece for delta in deltas for piece in delta.calls),
        prompt_logprobs=tuple(score for delta in deltas for score in delta.prompt_logprobs),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
    )


def whole_answer(
    generation: Generation,
    choices: Sequence[Delta],
    usage: Usage,
    tokenizer: Tokenizer,
    *,
    model: str,
    created: int,
) -> Completion | ChatCompletion:
    """The body of a response that is not streamed. `choices` is in order of index."""
    top = generation.top_logprobs
    if generation.chat:
        short_ids = generation.reading.short_ids
        turns = [
            chat_choice(i, choice, tokenizer, top, short_ids=short_ids)
            for i, choice in enumerate(choices)
        ]
        prompt_ids: tuple[int, ...] | UnsetType = UNSET
        if generation.return_token_ids:
            prompt_ids = generation.prompts[0].ids
            turns = [
                replace(turn, token_ids=c.token_ids) for turn, c in zip(turns, choices, strict=True)
            ]
        scores: PromptLogprobs | UnsetType = UNSET
        if generation.prompt_logprobs is not None:
            scores = prompt_scores(0, choices[0], generation, tokenizer)
        return ChatCompletion(
            generation.answer_id, created, model, turns, usage, prompt_ids, scores
        )
    texts = [completion_choice(i, choice, tokenizer, top) for i, choice in enumerate(choices)]
    if generation.return_token_ids:
        texts = [with_ids(text, c, generation) for text, c in zip(texts, choices, strict=True)]
    if generation.prompt_logprobs is not None:
        texts = [
            replace(text, prompt_logprobs=prompt_scores(text.index, c, generation, tokenizer))
            for text, c in zip(texts, choices, strict=True)
        ]
    return Completion(generation.answer_id, created, model, texts, usage)


def prompt_scores(
    index: int, choice: Delta, generation: Generation, tokenizer: Tokenizer
) -> PromptLogprobs:
    """Log-probabilities of a choice's prompt, which the client has asked for."""
    prompt = generation.prompts[index // generation.choices_per_prompt]
    top = generation.prompt_logprobs or 0
    return prompt_logprobs(prompt.ids, choice.prompt_logprobs, tokenizer, top)


def chat_choice(
    index: int, choice: Delta, tokenizer: Tokenizer, top: int | None, *, short_ids: bool
) -> ChatChoice:
    """One choice of a chat; `top` is the number of alternatives, None for no log-probabilities."""
    scores = None if top is None else chat_logprobs(choice.scored, tokenizer, top)
    calls = whole_calls(choice.calls, short_ids=short_ids)
    reasoning = choice.reasoning or UNSET
    message = ChatMessage(
        choice.text or None if calls else choice.text,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=calls or UNSET,
    )
    return ChatChoice(index, message, scores, choice.finish_reason)


def completion_choice(
    index: int, choice: Delta, tokenizer: Tokenizer, top: int | None
) -> CompletionChoice:
    """One choice of a completion, or of one of its chunks."""
    scores = None if top is None else completion_logprobs(choice.scored, tokenizer, top)
    return CompletionChoice(index, choice.text, scores, choice.finish_reason)


def with_ids(
    said: CompletionChoice, choice: Delta, generation: Generation, *, first: bool = True
) -> CompletionChoice:
    """The same with the ids of its tokens, and those of its prompt if it is the first chunk."""
    prompt = generation.prompts[said.index // generation.choices_per_prompt]
    prompt_ids = prompt.ids if first else UNSET
    return replace(said, token_ids=choice.token_ids, prompt_token_ids=prompt_ids)
