"""`LLM`: a model in this process, for scripts and notebooks."""

from __future__ import annotations

import json
import math
import operator
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from checkpoints import DEFAULT_MODEL, Store, default_store_path, open_checkpoint
from jaxserve.config import EngineConfig
from jaxserve.errors import EngineStopped, JaxserveError, RequestError
from jaxserve.fetch import ensure_pulled
from jaxserve.offline.loop import Completion, complete_all
from jaxserve.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_TOP_LOGPROBS, SamplingParams
from jaxserve.server.generation import Generation, plan_chat, plan_completion
from jaxserve.server.limits import Limits, within
from jaxserve.server.openai import ChatBody, CompletionBody, decode_body
from jaxserve.server.prompts import check_vocabulary
from jaxserve.server.text import BareIds, Tokenizer
from jaxserve.startup import LoadedEngine, load_engine
from jaxserve.terminal import ProgressBar
from jaxserve.tokenizer import Tokenizer as ModelTokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Sampling = SamplingParams | Sequence[SamplingParams] | None

DIFFERENT = {
    "seed",
    "bad_words",
    "prompt_logprobs",
    "logit_bias",
    "top_logprobs",
    "constraint",
    "pooling",
}
"""Fields of SamplingParams that a request's body says otherwise, or not at all."""


class LLM:
    """A model, ready to generate. Close it, or leave its `with` block, to free its memory.

    Threads may share one; their calls take turns.

    Attributes:
        description: of the device and the sizes chosen, for people.
        vocab_size: V: token ids are in [0, V).
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        store: Path | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        """Load a model and compile its steps.

        Args:
            model: as `jaxserve serve` takes it: a name, a path or hf:org/name.
            store: folder of converted models; None is the user's own.
            progress: show bars on stderr.
            options: other fields of `EngineConfig`, such as `max_rows` or `max_context`. Unless
                told otherwise it makes no promise, so that no prompt is refused for its sake.

        Raises:
            CheckpointError: the model cannot be found or read.
            ConfigError: the options do not fit together, the model or the device.
        """
        config = EngineConfig(
            model, store or default_store_path(), **{"no_promise": True} | options
        )
        self._progress = progress
        self._taking_turns = threading.Lock()
        ensure_pulled(config.model, config.store)
        checkpoint = open_checkpoint(config.model, Store(config.store))
        vocab_size = checkpoint.config.vocab_size
        self._tokenizer: Tokenizer = BareIds()
        if checkpoint.tokenizer is not None:
            self._tokenizer = ModelTokenizer(checkpoint.tokenizer, vocab_size=vocab_size)
        with ProgressBar(quiet=not progress) as bar:
            self._loaded: LoadedEngine | None = load_engine(config, progress=bar.update)
        self._limits = Limits(
            vocab_size=vocab_size,
            max_context=self._loaded.engine.scheduler.max_context,
            max_sequences=1,
            eos_ids=checkpoint.config.eos_ids,
        )
        self.description = self._loaded.description
        self.vocab_size = vocab_size

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Continue prompts.

        Args:
            prompts: text or token ids, one or several.
            sampling: how to draw tokens, for all prompts or for each its own; None is what the
                API does by default, with a fresh seed for each prompt. The same seed draws the
                same tokens. The model's end tokens end an answer besides `stop_token_ids`.
            stop: strings that end an answer.
            ignore_eos: the end tokens do not.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            RequestError: a prompt or its settings cannot be served; says which. Nothing runs then.
        """
        texts = one_or_several(prompts)
        settings = for_each(sampling, len(texts))
        more = {"stop": [stop] if isinstance(stop, str) else list(stop), "ignore_eos": ignore_eos}
        bodies = [{"prompt": text, **more} for text in texts]
        return self._answers(bodies, settings, "prompts")

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: Sampling = None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        **template: Any,
    ) -> list[Completion]:
        """Answer a conversation, or several.

        Args:
            messages: with `role` and `content`, as the API takes them.
            sampling, stop, ignore_eos: as for `generate`. Without `sampling` an answer may take all
                of the context.
            template: arguments of the model's chat template.

        Returns, Raises: as `generate`.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        chats = [messages] if single else list(messages)
        settings = for_each(sampling, len(chats))
        more: dict[str, Any] = {"stop": [stop] if isinstance(stop, str) else list(stop)}
        more |= {"ignore_eos": ignore_eos, "chat_template_kwargs": template}
        bodies = [{"messages": chat, **more} for chat in chats]
        return self._answers(bodies, settings, "messages")

    def plan(self, body: Mapping[str, Any], sampling: SamplingParams | None = None) -> Generation:
        """What a body of /v1/completions, or of /v1/chat/completions if it has messages, asks for.

        `sampling` goes before what the body says. Raises RequestError if it cannot be served.
        """
        if sampling is not None and sampling.pooling is not None:
            raise RequestError(
                "pooling is for vectors, and this generates tokens: leave it out", param="pooling"
            )
        asked = dict(body) if sampling is None else dict(body) | body_fields(sampling)
        chat = "messages" in asked
        if chat and sampling is not None and sampling.top_logprobs is not None:
            asked |= {"logprobs": True, "top_logprobs": asked.pop("logprobs")}
        raw = json.dumps(asked, default=operator.index).encode()  # numpy's whole numbers too
        if chat:
            made = plan_chat(decode_body(raw, ChatBody), self._tokenizer, self._limits)
        else:
            made = plan_completion(decode_body(raw, CompletionBody), self._tokenizer, self._limits)
        if sampling is None:
            return made
        check_words(sampling, self._limits.vocab_size)
        within("prompt_logprobs", sampling.prompt_logprobs, 0, MAX_TOP_LOGPROBS, default=0)
        (request,) = made.requests
        drawn = replace(
            request.sampling,
            bad_words=sampling.bad_words,
            prompt_logprobs=sampling.prompt_logprobs,
            constraint=sampling.constraint,
        )
        return replace(made, requests=(replace(request, sampling=drawn),))

    def complete(
        self, generations: Iterable[Generation]
    ) -> Iterator[tuple[int, Completion | JaxserveError]]:
        """(place, answer or what went wrong) of each, as they end. They are taken as there is room.

        Raises:
            EngineStopped: it is closed.
        """
        with self._taking_turns:
            if self._loaded is None:
                raise EngineStopped("this LLM is closed: make another one")
            try:
                yield from complete_all(
                    self._loaded.engine, self._loaded.grammars, self._tokenizer, generations
                )
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException:
                self._loaded = None  # a step that failed may have taken the cache with it
                raise

    def close(self) -> None:
        """Free the model's memory. A second time does nothing."""
        with self._taking_turns:
            self._loaded = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answers(
        self,
        bodies: Sequence[Mapping[str, Any]],
        settings: Sequence[SamplingParams | None],
        name: str,
    ) -> list[Completion]:
        made: list[Generation] = []
        for index, (body, sampling) in enumerate(zip(bodies, settings, strict=True)):
            try:
                made.append(self.plan(body, sampling))
            except RequestError as error:
                raise RequestError(f"{name}[{index}]: {error}", param=error.param) from error
        answers: list[Completion | None] = [None] * len(made)
        with ProgressBar(quiet=not self._progress) as bar:
            bar.update("generating", 0, len(made))
            for number, (index, outcome) in enumerate(self.complete(made), 1):
                if isinstance(outcome, JaxserveError):
                    raise outcome
                answers[index] = outcome
                bar.update("generating", number, len(made))
        return [answer for answer in answers if answer is not None]


def one_or_several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts of what may be one of them."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral)):
        prompts = [cast(Prompt, prompts)]
    several = cast(Sequence[Prompt], prompts)
    return [prompt if isinstance(prompt, str) else list(prompt) for prompt in several]


def for_each(sampling: Sampling, number: int) -> list[SamplingParams | None]:
    """The settings of each prompt."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * number
    if len(sampling) != number:
        raise RequestError(
            f"there are {number} prompts and {len(sampling)} sampling settings: give one for all, "
            "or one for each",
            param="sampling",
        )
    return list(sampling)


def body_fields(sampling: SamplingParams) -> dict[str, Any]:
    """What a request's body would say, so that it is checked as one."""
    plain = [field.name for field in fields(sampling) if field.name not in DIFFERENT]
    for name in plain:
        value = getattr(sampling, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name} is {value}: it must be a finite number", param=name)
    return {name: getattr(sampling, name) for name in plain} | {
        "seed": sampling.seed if sampling.seed < 2**63 else sampling.seed - 2**64,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias},
        "logprobs": sampling.top_logprobs,
    }


def check_words(sampling: SamplingParams, vocab_size: int) -> None:
    """RequestError for bad words, here in tokens, that the device has no room for."""
    words = sampling.bad_words
    if len(words) > MAX_BAD_WORDS or not all(1 <= len(w) <= MAX_BAD_WORD_TOKENS for w in words):
        raise RequestError(
            f"bad_words may be up to {MAX_BAD_WORDS} sequences of 1 to {MAX_BAD_WORD_TOKENS} "
            "tokens each",
            param="bad_words",
        )
    for word in words:
        check_vocabulary(list(word), "bad_words", vocab_size, param="bad_words")
