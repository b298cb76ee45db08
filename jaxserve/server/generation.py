"""From a request body to the requests of the engine, with every default resolved and every limit
checked. One rule for lengths on both endpoints: prompt + max_tokens must fit the context.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace

from jaxserve.errors import RequestError
from jaxserve.request import MAX_TOP_LOGPROBS, Request
from jaxserve.server.answer_constraint import answer_constraint
from jaxserve.server.constraint import asked_constraint
from jaxserve.server.keys import NOBODY, Caller
from jaxserve.server.limits import Limits, within
from jaxserve.server.openai import ChatBody, CompletionBody, GenerationBody, StreamOptions
from jaxserve.server.prompts import Prompt, chat_prompt, completion_prompts
from jaxserve.server.reading import NO_HABITS, PLAIN, Habits, Reading, chat_reading
from jaxserve.server.sampling import sampling_params
from jaxserve.server.standing import deadline, service_class
from jaxserve.server.text import Tokenizer
from jaxserve.server.tools import tool_use

DEFAULT_MAX_TOKENS = 16
"""Of /v1/completions, as OpenAI has it. A chat may use all of the context."""
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Generation:
    """Everything one HTTP request asks for.

    Attributes:
        answer_id: the `id` of the answer.
        prompts: what to continue.
        requests: n for each prompt, prompt after prompt; position is the choice's index.
        stop: strings that end a choice. include_stop: they are part of its text.
        skip_special_tokens: special tokens have no text.
        echo: the text of a choice starts with its prompt.
        reading: how the text becomes an answer.
        constrained_by: the field that says what the text has to be like; None leaves it free.
        chat, stream, include_usage: the form of the answer.
        prompt_logprobs: alternatives wanted for each token of the prompts; None wants none of it.
        return_token_ids: the answer has the ids of prompts and choices, too.
        usage_in_chunks: every chunk of a stream counts the tokens so far.
        user: who asks, in the client's words. For the log only.
    """

    answer_id: str
    prompts: tuple[Prompt, ...]
    requests: tuple[Request, ...]
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    echo: bool
    reading: Reading
    constrained_by: str | None
    chat: bool
    stream: bool
    include_usage: bool
    prompt_logprobs: int | None
    return_token_ids: bool
    usage_in_chunks: bool
    user: str | None

    @property
    def choices_per_prompt(self) -> int:
        return len(self.requests) // len(self.prompts)

    @property
    def top_logprobs(self) -> int | None:
        return self.requests[0].sampling.top_logprobs


def plan_completion(
    body: CompletionBody, tokenizer: Tokenizer, limits: Limits, caller: Caller = NOBODY
) -> Generation:
    """Raises RequestError, naming the field, for anything that cannot be served."""
    n = within("n", body.n, 1, MAX_N, default=1)
    if body.best_of not in (None, n):
        raise RequestError(
            f"best_of is not supported (found {body.best_of}): all that is generated is answered; "
            f"leave it out or send n, {n}",
            param="best_of",
        )
    top_logprobs = body.logprobs
    if top_logprobs is not None:
        within("logprobs", top_logprobs, 0, MAX_TOP_LOGPROBS, default=0)
    prompts = completion_prompts(body, tokenizer, limits.vocab_size)
    return plan(
        body,
        prompts,
        n,
        tokenizer,
        limits,
        max_tokens=body.max_tokens,
        top_logprobs=top_logprobs,
        prefix="cmpl-",
        caller=caller,
    )


def plan_chat(
    body: ChatBody,
    tokenizer: Tokenizer,
    limits: Limits,
    caller: Caller = NOBODY,
    *,
    habits: Habits = NO_HABITS,
) -> Generation:
    """Raises RequestError, naming the field, for anything that cannot be served."""
    n = within("n", body.n, 1, MAX_N, default=1)
    top_logprobs = within("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS, default=0)
    if top_logprobs and not body.logprobs:
        raise RequestError(
            f"top_logprobs is {top_logprobs} but logprobs is not true", param="top_logprobs"
        )
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    elif body.max_tokens not in (None, max_tokens):
        raise RequestError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {max_tokens}: send one",
            param="max_tokens",
        )
    tools = tool_use(body, tokenizer, habits.calls)
    prompt = chat_prompt(body, tokenizer, None if tools is None else tools.tools)
    reading = chat_reading(body, tools, habits, prompt.ids, tokenizer)
    return plan(
        body,
        (prompt,),
        n,
        tokenizer,
        limits,
        max_tokens=max_tokens,
        top_logprobs=top_logprobs if body.logprobs else None,
        prefix="chatcmpl-",
        caller=caller,
        reading=reading,
    )


def plan(
    body: GenerationBody,
    prompts: tuple[Prompt, ...],
    n: int,
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    max_tokens: int | None,
    top_logprobs: int | None,
    prefix: str,
    caller: Caller,
    reading: Reading = PLAIN,
) -> Generation:
    """What both endpoints share. `max_tokens` is the client's, `top_logprobs` already checked."""
    if len(prompts) * n > limits.max_sequences:
        raise RequestError(
            f"{len(prompts)} prompts times n = {n} are {len(prompts) * n} sequences; "
            f"this server takes at most {limits.max_sequences} in one request",
            param="n",
        )
    chat = isinstance(body, ChatBody)
    prompts = truncated(prompts, body.truncate_prompt_tokens, max_tokens, limits)
    answer_id = prefix + secrets.token_hex(12)
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    sampling = sampling_params(body, tokenizer, limits, top_logprobs)
    asked = asked_constraint(body)
    held_to = answer_constraint(asked, reading, tokenizer, ignore_eos=bool(body.ignore_eos))
    if held_to is not None:
        sampling = replace(sampling, constraint=held_to.constraint)
        if held_to is asked:
            reading = PLAIN  # it holds from the first token on: no room for thoughts or calls
    if echo:
        sampling = replace(sampling, prompt_logprobs=top_logprobs)
    if body.prompt_logprobs is not None:
        within("prompt_logprobs", body.prompt_logprobs, 0, MAX_TOP_LOGPROBS, default=0)
        if body.stream:
            raise RequestError(
                "prompt_logprobs cannot be streamed: leave it or stream out",
                param="prompt_logprobs",
            )
        sampling = replace(sampling, prompt_logprobs=MAX_TOP_LOGPROBS)  # for the ranks
    seeds = choice_seeds(body.seed, len(prompts), n)
    ask = Request(
        "",
        (),
        sampling,
        cache_salt=f"{'' if limits.shared_cache else caller.name}/{body.cache_salt or ''}",
        service_class=service_class(body),
        tenant=caller.tenant(body.user),
        deadline=deadline(body),
    )
    requests: list[Request] = []
    for prompt_index, prompt in enumerate(prompts):
        length = output_length(
            len(prompt.ids), max_tokens, limits.max_context, chat=chat, echo=echo
        )
        within("min_tokens", sampling.min_tokens, 0, length, default=0)
        for seed in seeds[prompt_index * n : (prompt_index + 1) * n]:
            params = replace(sampling, max_tokens=length, seed=seed)
            name = f"{answer_id}-{len(requests)}"
            requests.append(replace(ask, request_id=name, prompt_ids=prompt.ids, sampling=params))
    return Generation(
        answer_id=answer_id,
        prompts=prompts,
        requests=tuple(requests),
        stop=stop_strings(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        echo=echo,
        reading=reading,
        constrained_by=None if held_to is None else held_to.param,
        chat=chat,
        stream=bool(body.stream),
        include_usage=wants_usage(body.stream_options, stream=bool(body.stream)),
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        usage_in_chunks=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        user=body.user,
    )


def truncated(
    prompts: tuple[Prompt, ...], keep: int | None, max_tokens: int | None, limits: Limits
) -> tuple[Prompt, ...]:
    """The last `keep` tokens of each prompt; -1 keeps what fits together with the output asked."""
    if keep is None:
        return prompts
    within("truncate_prompt_tokens", keep, -1, limits.max_context, default=-1)
    if keep == 0:
        raise RequestError(
            "truncate_prompt_tokens is 0: keep at least 1 token, or send -1 for all that fit",
            param="truncate_prompt_tokens",
        )
    if keep < 0:
        keep = max(1, limits.max_context - (1 if max_tokens is None else max_tokens))
    return tuple(
        prompt if len(prompt.ids) <= keep else Prompt(prompt.ids[-keep:]) for prompt in prompts
    )


def output_length(
    num_prompt: int, max_tokens: int | None, max_context: int, *, chat: bool, echo: bool
) -> int:
    """Tokens to generate at most.

    What the client asks for must fit together with the prompt; the default is cut to what fits.
    With echo it may be nothing: the answer is the prompt then.
    """
    least = 0 if echo else 1
    if max_tokens is not None and max_tokens < least:
        remedy = "it must be at least 0" if echo else "it must be at least 1, or 0 with echo"
        raise RequestError(f"max_tokens is {max_tokens}: {remedy}", param="max_tokens")
    room = max_context - num_prompt
    asked = 1 if max_tokens is None else max_tokens
    if room < asked:
        raise RequestError(
            f"this model's context holds {max_context} tokens; the prompt has {num_prompt} and "
            f"{'at least 1' if max_tokens is None else max_tokens} more were requested: shorten "
            "the prompt or lower max_tokens",
            param="max_tokens" if room > 0 else "messages" if chat else "prompt",
        )
    if max_tokens is not None:
        return max_tokens
    return room if chat else min(DEFAULT_MAX_TOKENS, room)


def choice_seeds(seed: int | None, num_prompts: int, n: int) -> list[int]:
    """A u64 for every choice, prompt after prompt.

    With a seed, choice i of a prompt draws the same tokens whatever else is in the list, and
    choices differ. Without one everything is fresh.
    """
    if seed is None:
        return [secrets.randbits(64) for _ in range(num_prompts * n)]
    digests = [hashlib.sha256(f"{seed}:{choice}".encode()).digest() for choice in range(n)]
    return [int.from_bytes(digest[:8], "big") for digest in digests] * num_prompts


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings, checked. RequestError for an empty one, a huge one, or too many."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop has {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop"
        )
    for string in stops:
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"stop has a string of {len(string)} characters, 1 to {MAX_STOP_LENGTH} are "
                "allowed",
                param="stop",
            )
    return stops


def wants_usage(options: StreamOptions | None, *, stream: bool) -> bool:
    """Whether the stream ends with a count of tokens. RequestError for options without a stream."""
    if options is None:
        return False
    if not stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if options.include_obfuscation:
        raise RequestError(
            "stream_options.include_obfuscation is not supported: leave it out",
            param="stream_options",
        )
    if options.continuous_usage_stats and not options.include_usage:
        raise RequestError(
            "stream_options.continuous_usage_stats needs include_usage to be true",
            param="stream_options",
        )
    return bool(options.include_usage)
