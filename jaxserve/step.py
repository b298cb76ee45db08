"""The jitted step: one forward pass over a packed batch, from tokens to tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.batch import (
    NO_TOKEN,
    BatchDescriptor,
    DeviceState,
    LayerPages,
    PageTable,
    PromptScores,
    SamplingArrays,
    StepOutput,
)
from jaxserve.logit_rules import apply_rules, count_fed
from jaxserve.models.decoder import Decoder, Model
from jaxserve.models.llama import Params
from jaxserve.pooling import pool_rows
from jaxserve.prompt_scores import no_scores, score_prompts
from jaxserve.row_blocks import in_row_blocks
from jaxserve.sampling import greedy, likeliest, sample, token_logprobs

Chosen = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Tokens i32[n], and what `token_logprobs` says of them."""


class StepFn(Protocol):
    """One forward pass over a packed batch.

    Pure: reads its arguments, returns everything it changes. It is traced once per `StepShape`,
    so no Python branch may depend on an array. The state it is given is donated.
    """

    def __call__(
        self,
        params: Params,
        state: DeviceState,
        batch: BatchDescriptor,
        page_table: PageTable,
    ) -> tuple[StepOutput, DeviceState]: ...


class StepFactory(Protocol):
    """Makes a `StepFn` for the model served; what `--step package.module:factory` names."""

    def __call__(self, decoder: Decoder, /) -> StepFn: ...


def make_step(model: Model) -> StepFn:
    """The default step: run the model, keep each row's last hidden state, draw a token."""

    def step(
        params: Params, state: DeviceState, batch: BatchDescriptor, page_table: PageTable
    ) -> tuple[StepOutput, DeviceState]:
        token_ids = batch.fed_token_ids(state.last_token)
        hidden, layers = model.forward(params, state.layers, token_ids, batch, page_table)
        logits = model.unembed(params, batch.last_hidden(hidden))
        prompt, pooled = look_at_prompts(
            hidden, token_ids, batch, lambda x: model.unembed(params, x)
        )
        return draw(logits, state, layers, batch, prompt, pooled=pooled)

    return step


def look_at_prompts(
    hidden: jax.Array,
    token_ids: jax.Array,
    batch: BatchDescriptor,
    unembed: Callable[[jax.Array], jax.Array],
) -> tuple[PromptScores, jax.Array]:
    """Log-probabilities of prompts, and their hidden states pooled: `StepOutput.prompt`, `.pooled`.

    One branch for both, which most steps do not take: a GPU's host waits at each. Arguments as of
    `score_prompts`.
    """

    def look() -> tuple[PromptScores, jax.Array]:
        return score_prompts(hidden, token_ids, batch, unembed), pool_rows(hidden, batch)

    def pass_by() -> tuple[PromptScores, jax.Array]:
        nothing = jnp.zeros((batch.pooling.shape[0], hidden.shape[1]), jnp.float32)
        return no_scores(token_ids), nothing

    asked = jnp.any(batch.next_token != NO_TOKEN) | jnp.any(batch.pooling != 0)
    return lax.cond(asked, look, pass_by)


def draw(
    logits: jax.Array,
    state: DeviceState,
    layers: tuple[LayerPages, ...],
    batch: BatchDescriptor,
    prompt: PromptScores | tuple[()] = (),
    *,
    pooled: jax.Array | tuple[()] = (),
    aux: Any = (),
) -> tuple[StepOutput, DeviceState]:
    """How a step ends: a token for every row, remembered in the row's slot.

    Args:
        logits: f32[R, V] of each row's last token. Log-probabilities are those of these logits;
            penalties and other rules of the request change what is drawn.
        state: the state the step was given.
        layers: its cache, this step's keys and values written.
        batch: the step's batch.
        prompt, pooled, aux: passed on to `StepOutput`.
    """
    # A drawn token's position is the number of tokens before it.
    rules = count_fed(state.rules, state.last_token, batch)

    sampling = batch.sampling
    asks = sampling.has_rules | sampling.is_constrained
    asks |= (sampling.temperature > 0) | (sampling.top_logprobs >= 0)

    def choose(some: tuple[jax.Array, jax.Array, jax.Array, SamplingArrays]) -> Chosen:
        logits, position, slot, sampling = some
        ruled = apply_rules(logits, rules, position, slot, sampling)
        token_ids = sample(ruled, position, sampling)
        return token_ids, *token_logprobs(logits, token_ids, sampling)

    def choose_likeliest() -> Chosen:
        token_ids = greedy(logits)
        return token_ids, *likeliest(None, token_ids)

    token_ids, logprobs, top_ids, top_logprobs = lax.cond(
        jnp.any(asks),
        lambda: in_row_blocks(choose, (logits, batch.kv_len, batch.slot, sampling)),
        choose_likeliest,
    )
    last_token = state.last_token.at[batch.slot].set(token_ids, mode="drop")
    output = StepOutput(token_ids, logprobs, top_ids, top_logprobs, prompt, pooled, aux)
    return output, DeviceState(layers, last_token, rules)


def compile_step(
    step: StepFn,
    params: Params,
    state: DeviceState,
    batch: BatchDescriptor,
    page_table: PageTable,
) -> jax.stages.Compiled:
    """Compile for exactly these shapes, giving the state's buffers away.

    An executable cannot retrace. Called with any other shape it raises TypeError, so a stray
    shape in serving is an error and never a silent minute of compilation. The arguments may be
    arrays or `jax.ShapeDtypeStruct`s.
    """
    return jax.jit(step, donate_argnums=1).lower(params, state, batch, page_table).compile()
