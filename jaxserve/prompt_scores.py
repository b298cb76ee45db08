"""Log-probabilities of a prompt's own tokens: the head applied to more than each row's last token.

Logits of all tokens of a step would take memory in proportion to tokens times vocabulary, so they
are made of a block of them at a time, and only of blocks with a token of a row that asks.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.batch import NO_TOKEN, BatchDescriptor, PromptScores
from jaxserve.row_blocks import in_row_blocks
from jaxserve.sampling import likeliest


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

    def score(block: tuple[jax.Array, jax.Array, jax.Array]) -> PromptScores:
        hidden, following, wanted = block
        none = PromptScores(*likeliest(None, following))
        return lax.cond(
            jnp.any(wanted),
            lambda: PromptScores(*likeliest(unembed(hidden), following)),
            lambda: none,
        )

    return in_row_blocks(score, (hidden, following, wanted))


def no_scores(token_ids: jax.Array) -> PromptScores:
    """Those of a step in which nobody asks."""
    return PromptScores(*likeliest(None, token_ids))
