"""Log-probabilities of a prompt's own tokens: the head applied to more than each row's last token.

Logits of all tokens of a step would take memory in proportion to tokens times vocabulary, so they
are made a chunk at a time, and only of chunks with a token of a row that asks.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.batch import NO_TOKEN, BatchDescriptor, PromptScores
from jaxserve.sampling import likeliest

CHUNK = 64
"""Tokens whose logits exist at a time."""


def score_prompts(
    hidden: jax.Array,
    token_ids: jax.Array,
    batch: BatchDescriptor,
    unembed: Callable[[jax.Array], jax.Array],
) -> PromptScores:
    """How likely each token made the one that follows it in its prompt.

    Args:
        hidden: [T, E], final hidden states.
        token_ids: i32[T].
        batch: the step's batch.
        unembed: [n, E] to logits f32[n, V].
    """
    asked = batch.next_token != NO_TOKEN
    place = jnp.where(batch.kv_len > 0, batch.last_token, hidden.shape[0])
    following = jnp.roll(token_ids, -1).at[place].set(batch.next_token, mode="drop")
    wanted = asked.at[batch.row_ids].get(mode="fill", fill_value=False)  # bool[T]

    def score(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> PromptScores:
        hidden, following, wanted = chunk
        none = PromptScores(*likeliest(None, following))
        return lax.cond(
            jnp.any(wanted),
            lambda: PromptScores(*likeliest(unembed(hidden), following)),
            lambda: none,
        )

    def score_all() -> PromptScores:
        size = min(CHUNK, hidden.shape[0])
        chunks = jax.tree.map(lambda x: _split(x, size), (hidden, following, wanted))
        scores = lax.map(score, chunks)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: hidden.shape[0]], scores)

    none = PromptScores(*likeliest(None, following))
    return lax.cond(jnp.any(asked), score_all, lambda: none)


def _split(x: jax.Array, size: int) -> jax.Array:
    """[T, ...] as [chunks, size, ...], zeros at the end."""
    padding = [(0, -x.shape[0] % size)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding).reshape(-1, size, *x.shape[1:])
