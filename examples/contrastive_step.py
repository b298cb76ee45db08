"""DoLa (Chuang et al. 2023): decode by contrasting the last layer with an early one.

What the upper layers add to a prediction is closer to what a model knows than the prediction
itself. For each row the early layer is chosen anew, among candidates, as the one whose
distribution differs most from the last layer's; then each token's score is its logit minus its
early logit, and tokens that the last layer finds implausible are out.

    jaxserve serve --step examples.contrastive_step:make_step

Every layer still runs and writes its keys and values, so pages, batching, chunked prompts and
preemption are what they always are. Temperature, top-k, top-p and seeds apply to the contrasted
distribution, and log-probabilities report it.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxserve.batch import BatchDescriptor, DeviceState, PageTable, StepOutput
from jaxserve.models.decoder import Decoder
from jaxserve.models.llama import Params
from jaxserve.step import StepFn, draw


def make_step(decoder: Decoder) -> StepFn:
    """DoLa with the paper's alpha; the candidates are every second layer of the lower half.

    The paper's experiments also penalise repetition; this does not.
    """
    lower_half = range(2, decoder.config.num_layers // 2 + 1, 2)
    return contrastive_step(decoder, early_layers=tuple(lower_half) or (1,))


def contrastive_step(
    decoder: Decoder, *, early_layers: tuple[int, ...], strength: float = 1.0, alpha: float = 0.1
) -> StepFn:
    """A step that draws from the contrast of the last layer with an early one.

    With strength 0 and alpha 0 its tokens are the default step's, bit for bit.

    Args:
        decoder: the model.
        early_layers: candidates; n stands for the output of the first n layers, 1 <= n < L.
        strength: factor on the early logits. 1 is DoLa, 0 contrasts with nothing.
        alpha: a token is plausible if its probability under the last layer is at least alpha
            times the likeliest one's. 0 lets all pass.

    Returns:
        A step whose `aux` is i32[R], the early layer each row was contrasted with.

    Raises:
        ValueError: an early layer that is not one, or an alpha outside [0, 1].
    """
    check(early_layers, alpha, decoder.config.num_layers)

    def step(
        params: Params, state: DeviceState, batch: BatchDescriptor, page_table: PageTable
    ) -> tuple[StepOutput, DeviceState]:
        layers, newest = [], []  # each layer's pages, and its output for each row's last token
        token_ids = batch.fed_token_ids(state.last_token)
        for x, pages in decoder.run_layers(params, state.layers, token_ids, batch, page_table):
            layers.append(pages)
            newest.append(x[batch.last_token])

        def logits(hidden: jax.Array) -> jax.Array:
            return decoder.unembed(params, decoder.final_norm(params, hidden))

        final = logits(newest[-1])  # f32[R, V]
        early = jnp.stack([logits(newest[layer - 1]) for layer in early_layers])  # f32[C, R, V]
        chosen = jnp.argmax(divergence(final, early), axis=0)  # i32[R]
        early = jnp.take_along_axis(early, chosen[None, :, None], axis=0)[0]
        scores = contrast(final, early, strength=strength, alpha=alpha)
        layer = jnp.array(early_layers, jnp.int32)[chosen]
        return draw(scores, state, tuple(layers), batch, aux=layer)

    return step


def check(early_layers: tuple[int, ...], alpha: float, num_layers: int) -> None:
    """Raises ValueError for settings that mean nothing."""
    if not early_layers or not all(1 <= layer < num_layers for layer in early_layers):
        raise ValueError(
            f"early layers {early_layers} of a model of {num_layers}: name one or more, "
            f"each from 1 to {num_layers - 1}"
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}: it must be between 0 and 1")


def contrast(final: jax.Array, early: jax.Array, *, strength: float, alpha: float) -> jax.Array:
    """f32[R, V] scores of f32[R, V] final and early logits; -inf for implausible tokens.

    The paper subtracts log-probabilities. Logits differ from them by a number per row, which
    changes neither the likeliest token nor the softmax.
    """
    cutoff = jnp.max(final, axis=-1, keepdims=True) + (math.log(alpha) if alpha else -math.inf)
    # NaN is not below the cut-off: it stays, and the engine reports it instead of a wrong token.
    return jnp.where(final < cutoff, -jnp.inf, final - strength * early)


def divergence(final: jax.Array, early: jax.Array) -> jax.Array:
    """f32[C, R]: Jensen-Shannon divergence of f32[R, V] final and each of f32[C, R, V] early."""
    log_p = jax.nn.log_softmax(final)[None]
    log_q = jax.nn.log_softmax(early)
    log_mean = jnp.logaddexp(log_p, log_q) - math.log(2)
    from_p = jnp.sum(jnp.exp(log_p) * (log_p - log_mean), axis=-1)
    from_q = jnp.sum(jnp.exp(log_q) * (log_q - log_mean), axis=-1)
    return (from_p + from_q) / 2
