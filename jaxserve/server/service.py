"""What the handlers of one server share, and whether it can take requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from checkpoints.model_config import ModelConfig
from jaxserve.config import ServerConfig
from jaxserve.errors import NotFound
from jaxserve.frames import Progress
from jaxserve.server.client import WorkerClient
from jaxserve.server.failures import failure
from jaxserve.server.generation import Generation, plan_chat, plan_completion
from jaxserve.server.keys import NOBODY, Caller, Keys
from jaxserve.server.limits import Limits
from jaxserve.server.openai import ChatBody, CompletionBody, decode_body
from jaxserve.server.rates import Rates
from jaxserve.server.reading import Habits, model_habits
from jaxserve.server.replies import Usage
from jaxserve.server.text import Tokenizer

INLINE_BODY_BYTES = 4096
"""A completion this small is encoded faster than a thread is woken."""


class ModelNotFound(NotFound):
    """The request names a model that is not the one served here."""

    code = "model_not_found"


@dataclass
class Service:
    """One server. The fields in the second half change as it runs.

    Attributes:
        config: limits.
        model_name: what clients call the model.
        model: its vocabulary's end tokens and its context.
        tokenizer: its tokenizer.
        client: the way to the worker.
        habits: how the model writes calls and thoughts.
        keys: whose requests are taken. rates: how many, and of how many tokens.
        write_timeout: seconds a client may leave a full buffer unread before it is dropped.
        pool: threads for encoding prompts, first come first served.
        created: when the server started, Unix time.
        draining: it finishes what runs and takes nothing new.
        gave_up: why no worker will come any more, or None.
        on_progress: told how a worker's start is getting on.
        tokenizing: held by the text that /tokenize works on. num_tokenizing: it and those that
            wait.
        active: generation requests being handled.
        idle: set while `active` is 0.
    """

    config: ServerConfig
    model_name: str
    model: ModelConfig
    tokenizer: Tokenizer
    client: WorkerClient
    keys: Keys
    rates: Rates
    write_timeout: float
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "encode"))
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    gave_up: str | None = None
    on_progress: Callable[[Progress], None] = lambda progress: None
    tokenizing: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_tokenizing: int = 0
    active: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    habits: Habits = field(init=False)

    def __post_init__(self) -> None:
        self.habits = model_habits(
            self.config.tool_parser, self.config.reasoning_parser, self.tokenizer.chat_template
        )
        self.idle.set()

    def why_unavailable(self) -> str | None:
        """A sentence for clients and /health, or None if requests are welcome."""
        if self.draining:
            return "the server is shutting down"
        if self.gave_up is not None:
            return self.gave_up
        if self.client.ready is None:
            last = f" (the last one: {self.client.failed})" if self.client.failed else ""
            return f"the worker is starting{last}"
        silence = asyncio.get_running_loop().time() - self.client.last_heard
        if silence > self.client.longest_silence(self.config.heartbeat_timeout):
            return f"the worker has given no sign of life for {silence:.0f} s"
        return None

    def turn_away(self, num_sequences: int) -> web.Response | None:
        """The refusal if that many more sequences cannot be taken now, else None."""
        reason = self.why_unavailable()
        if reason is not None:
            return failure(503, reason)
        if self.client.num_open + num_sequences > self.config.max_pending:
            self.client.metrics.refused.labels("pending").inc(num_sequences)
            return failure(
                429,
                f"{self.client.num_open} sequences are in flight and this request adds "
                f"{num_sequences}; the limit is {self.config.max_pending}: try again later",
            )
        return None

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Counts the requests that a shutdown lets finish."""
        self.active += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if self.active == 0:
                self.idle.set()

    @property
    def max_context(self) -> int:
        """Most tokens of one sequence. Before the worker is ready it is the checkpoint's."""
        ready = self.client.ready
        return self.model.max_context if ready is None else ready.max_context

    def limits(self) -> Limits:
        """What the present worker can take; call only while one is ready."""
        ready = self.client.ready
        assert ready is not None
        return Limits(
            vocab_size=ready.vocab_size,
            max_context=ready.max_context,
            max_sequences=self.config.max_pending,
            eos_ids=self.model.eos_ids,
            shared_cache=self.config.shared_cache,
        )

    async def prepare(self, body: bytes, *, chat: bool, caller: Caller = NOBODY) -> Generation:
        """Decode and check a body and encode its prompts, off the event loop if that takes long.

        `caller` is who asks; without keys the body may say so itself.

        Raises:
            RequestError: the request cannot be served.
        """
        limits = self.limits()
        if not chat and len(body) <= INLINE_BODY_BYTES:
            return self._plan(body, chat, caller, limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool, self._plan, body, chat, caller, limits)

    def charge(self, caller: Caller, usage: Usage) -> None:
        """Note what a key has had: the output is taken from its tokens now, the prompt was."""
        self.rates.spend(caller.name, "tokens", usage.completion_tokens)
        if caller.has_key:
            self.client.metrics.used(caller.name, usage.prompt_tokens, usage.completion_tokens)

    def _plan(self, body: bytes, chat: bool, caller: Caller, limits: Limits) -> Generation:
        if chat:
            return self.plan_chat(decode_body(body, ChatBody), caller, limits)
        completion_body = decode_body(body, CompletionBody)
        self.check_model(completion_body.model)
        return plan_completion(completion_body, self.tokenizer, limits, caller)

    def plan_chat(self, body: ChatBody, caller: Caller, limits: Limits) -> Generation:
        """What a chat takes. RequestError if it cannot be served."""
        self.check_model(body.model)
        return plan_chat(body, self.tokenizer, limits, caller, habits=self.habits)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound for the name of another model; None stands for this one."""
        if name not in (None, self.model_name):
            raise ModelNotFound(
                f"the model {str(name)[:80]!r} is not served here; this is {self.model_name!r}",
                param="model",
            )


SERVICE = web.AppKey("service", Service)
