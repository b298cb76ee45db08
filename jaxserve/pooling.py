"""Hidden states of a prompt as one vector: what an embedding is made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.batch import POOL_LAST, POOL_SUM, BatchDescriptor


def pool_rows(hidden: jax.Array, batch: BatchDescriptor) -> jax.Array:
    """f32[R, E]: of each row that asks, the last hidden state or the sum of all; zeros else.

    `hidden` is [T, E], final hidden states.
    """
    num_rows = batch.pooling.shape[0]
    states = hidden.astype(jnp.float32)
    # Padding belongs to row R, which is cut off.
    sums = jax.ops.segment_sum(states, batch.row_ids, num_segments=num_rows + 1)[:num_rows]
    kind = batch.pooling[:, None]
    last = jnp.where(kind == POOL_LAST, batch.last_hidden(states), 0)
    return jnp.where(kind == POOL_SUM, sums, last)
