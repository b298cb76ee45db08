"""One choice: tokens in; text, thoughts and calls out, as soon as they are certain. No HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.errors import (
    DeadlinePassed,
    EngineStopped,
    JaxserveError,
    Overloaded,
    RequestError,
)
from jaxserve.parsers.parsed import CallDelta, Parsed
from jaxserve.request import FinishReason, PromptLogprob, TokenEvent
from jaxserve.server.generation import Generation
from jaxserve.server.replies import AnswerEnd
from jaxserve.server.text import Tokenizer
from jaxserve.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token whose log-probabilities the client wants to see.

    Attributes:
        event: the token. The first one of a prompt that is echoed has no log-probability.
        offset: characters of the choice's text before it.
    """

    event: TokenEvent
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain about a choice since the last look.

    Attributes:
        text: to append.
        scored: the tokens behind it, if log-probabilities were asked for.
        finish_reason: set on the last delta.
        reasoning: to append to the thoughts.
        calls: pieces of calls of functions.
        token_ids: all tokens behind it.
        prompt_logprobs: on the first delta, if asked for.
    """

    text: str
    scored: tuple[ScoredToken, ...]
    finish_reason: AnswerEnd | None
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


class Choice:
    """One sequence of an answer.

    Tokens whose text is held back, because a character is incomplete or a stop string may have
    begun, are held back with it: no log-probability shows what the text does not.

    Attributes:
        num_tokens: generated so far, the one that ended the choice included.
        num_reasoning: of them, until the model began to answer.
        num_cached: prompt tokens the engine did not have to compute.
        finish_reason: None while it goes on.
    """

    def __init__(self, generation: Generation, index: int, tokenizer: Tokenizer) -> None:
        prompt = generation.prompts[index // generation.choices_per_prompt]
        self._skip_special_tokens = skip = generation.skip_special_tokens
        self._detokenizer = tokenizer.detokenizer(
            prompt.ids, skip_special_tokens=skip, shown=generation.reading.marks
        )
        self._parser = generation.reading.make_parser()
        self._parsed = Parsed()
        self._include_stop = generation.include_stop
        self._stops: StopStrings | None = None
        if generation.stop:
            self._stops = StopStrings(generation.stop, include_stop=generation.include_stop)
        self._min_tokens = generation.requests[index].sampling.min_tokens
        self._scores = generation.top_logprobs is not None
        self._constrained_by = generation.constrained_by
        if generation.echo:
            self._parsed.content = (
                tokenizer.decode(prompt.ids, skip_special_tokens=skip)
                if prompt.text is None
                else prompt.text
            )
        self._prompt_ids = prompt.ids if generation.echo else ()
        self._tokenizer = tokenizer
        self._offset = len(self._parsed.content)
        self._scored: list[ScoredToken] = []
        self._token_ids: list[int] = []
        self._prompt_logprobs: tuple[PromptLogprob, ...] = ()
        self._ended = False
        self.num_tokens = 0
        self.num_reasoning = 0
        self.num_cached = 0
        self.finish_reason: AnswerEnd | None = None

    def push(self, event: TokenEvent) -> bool:
        """Take the choice's next event.

        Returns:
            True if the text has ended while the engine would go on: tell it to stop.

        Raises:
            EngineStopped: the engine gave this sequence up.
            Overloaded: it was not let in.
            DeadlinePassed: there was, or is, not enough time for it.
            RequestError: it asks for what cannot be.
        """
        if self.finish_reason is not None:
            return False  # tokens that were on their way when a stop string matched
        self.num_cached += event.num_cached
        self._prompt_logprobs += event.prompt_logprobs
        if self._scores and self._prompt_ids:
            self._scored += self._score_prompt(event.prompt_logprobs)
            self._prompt_ids = ()
        if event.token_id is None:
            reason = event.finish_reason
            if event.refusal is not None or reason not in ("length", "abort"):
                raise what_happened(event, self._constrained_by)
            self._finish(reason)  # no token was asked for, or somebody ended the request
            return False
        self.num_tokens += 1
        self._token_ids.append(event.token_id)
        if self._scores:
            self._scored.append(ScoredToken(event, self._offset))
        thought = self._parser.thinking
        if event.finish_reason != "stop" or self._include_stop:
            self._show(self._detokenizer.push(event.token_id))
        if thought or self._parser.thinking:
            self.num_reasoning = self.num_tokens
        if event.finish_reason is not None:
            self._finish(event.finish_reason)
        return self.finish_reason is not None and event.finish_reason is None

    def take(self) -> Delta | None:
        """What is new since the last call, or None if nothing is."""
        ended = self.finish_reason is not None and not self._ended
        parsed = self._parsed
        if not parsed and not ended:
            return None
        delta = Delta(
            parsed.content,
            tuple(self._scored),
            self.finish_reason,
            parsed.reasoning,
            tuple(parsed.calls),
            tuple(self._token_ids),
            self._prompt_logprobs,
        )
        self._token_ids.clear()
        self._prompt_logprobs = ()
        self._parsed = Parsed()
        self._scored.clear()
        self._ended = ended
        return delta

    def _score_prompt(self, scores: Sequence[PromptLogprob]) -> list[ScoredToken]:
        """The prompt's tokens, in their places in the text."""
        text = self._tokenizer.detokenizer((), skip_special_tokens=self._skip_special_tokens)
        scored, offset = [], 0
        for token_id, score in zip(self._prompt_ids, (None, *scores), strict=True):
            event = TokenEvent("", token_id)
            if score is not None:
                event = TokenEvent("", token_id, score.logprob, score.top_logprobs)
            scored.append(ScoredToken(event, offset))
            offset += len(text.push(token_id))
        return scored

    def _show(self, text: str) -> None:
        self._offset += len(text)
        matched = False
        if self._stops is not None and self.num_tokens > self._min_tokens:
            text, matched = self._stops.push(text)
        self._parser.push(text, self._parsed)
        if matched or (self._parser.ended and self.num_tokens >= self._min_tokens):
            self._end("stop")

    def _finish(self, reason: FinishReason) -> None:
        if self.finish_reason is not None:
            return  # its last token completed a stop string, or the one call that was allowed
        self._show(self._detokenizer.flush())
        if self.finish_reason is None:
            if self._stops is not None:
                self._parser.push(self._stops.flush(), self._parsed)
            self._end(reason)

    def _end(self, reason: FinishReason) -> None:
        self._parser.flush(self._parsed)
        called = reason == "stop" and self._parser.num_calls > 0
        self.finish_reason = "tool_calls" if called else reason


def what_happened(event: TokenEvent, param: str | None) -> JaxserveError:
    """The error behind an event without a token. `param` names the field that constrains it."""
    if event.refusal == "impossible":
        return RequestError(event.message, param=param)
    if event.refusal == "deadline":
        return DeadlinePassed(event.message)
    if event.refusal is not None:
        wait = event.retry_after
        return Overloaded(f"{event.message}: try again in {wait:g} s", retry_after=wait)
    return EngineStopped(event.message or "the engine gave this request up")
