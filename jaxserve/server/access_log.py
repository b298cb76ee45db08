"""One line of JSON for each HTTP request, when asked for: what came of it, and how long it took."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from jaxserve.server.choice import Choice
from jaxserve.server.generation import Generation
from jaxserve.server.metrics import Timeline

logger = logging.getLogger("jaxserve.access")


class Generated(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request that generates asked for and got. Sums over its choices, unless said.

    Attributes:
        answer_id: the `id` of the answer.
        tenant: who asked: the API key's name. Without keys `user`, or what stands for the key.
        service_class: interactive or batch.
        stream: whether the answer was streamed.
        choices: sequences.
        prompt_tokens: of each prompt, once. cached_tokens: that need not be computed.
        output_tokens: generated.
        finish_reasons: of each choice; None of one that did not get to its end.
        queue_seconds: from the request's arrival until its last sequence was let run.
        ttft_seconds: until its first token. tpot_seconds: per token after it, a mean.
    """

    answer_id: str
    tenant: str
    service_class: str
    stream: bool
    choices: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: tuple[str | None, ...]
    queue_seconds: float | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One HTTP request.

    Attributes:
        request_id: of its answer's X-Request-Id.
        method, path: asked for; the path as it came, percent-encoded.
        status: of the answer, 499 if nobody was left to read it.
        seconds: from its arrival to the end of the answer.
        client: address.
        tenant: name of the API key, where keys are asked for.
        generated: for one that got as far as generating.
    """

    request_id: str
    method: str
    path: str
    status: int
    seconds: float
    client: str | None = None
    tenant: str | None = None
    generated: Generated | None = None


def generated(
    generation: Generation, choices: Sequence[Choice], timelines: Sequence[Timeline]
) -> Generated:
    """Sum an answer up. `timelines` are those of the choices."""
    request = generation.requests[0]
    begun = [timeline for timeline in timelines if timeline.num_tokens]
    paced = [timeline.per_token for timeline in timelines if timeline.num_tokens > 1]
    return Generated(
        answer_id=generation.answer_id,
        tenant=request.tenant,
        service_class=request.service_class,
        stream=generation.stream,
        choices=len(choices),
        prompt_tokens=sum(len(prompt.ids) for prompt in generation.prompts),
        cached_tokens=sum(c.num_cached for c in choices[:: generation.choices_per_prompt]),
        output_tokens=sum(choice.num_tokens for choice in choices),
        finish_reasons=tuple(choice.finish_reason for choice in choices),
        queue_seconds=max((t.admitted - t.arrived for t in begun), default=None),
        ttft_seconds=min((t.first - t.arrived for t in begun), default=None),
        tpot_seconds=sum(paced) / len(paced) if paced else None,
    )


def log(make_line: Callable[[], Line]) -> None:
    """Write a line if anybody wants to read it."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", msgspec.json.encode(make_line(), enc_hook=str).decode())
