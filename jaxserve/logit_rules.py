"""What a request's rules do to its logits before a token is drawn: penalties.

Whatever is in `LogitRules`, a step in which no row has rules reads and computes nothing of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.batch import MAX_COUNT, BatchDescriptor, LogitRules

NO_SLOT = 2**31 - 1


def count_fed(rules: LogitRules, last_token: jax.Array, batch: BatchDescriptor) -> LogitRules:
    """The rules after this step's fed tokens, the ones the host could not know when it wrote them.

    Args:
        rules: of all slots; changed in place where the step's arguments are donated.
        last_token: i32[slots].
        batch: the step's batch.
    """
    fed = batch.fed(last_token)
    slot = jnp.where(batch.feed & batch.sampling.has_rules, batch.slot, NO_SLOT)
    count = rules.counts.at[slot, fed].get(mode="fill", fill_value=0)
    count = jnp.where(count < 2 * MAX_COUNT, count + jnp.int16(2), count)
    counts = rules.counts.at[slot, fed].set(count, mode="drop")
    return LogitRules(counts=counts, penalties=rules.penalties)


def apply_rules(logits: jax.Array, rules: LogitRules, batch: BatchDescriptor) -> jax.Array:
    """f32[R, V]: the logits to draw from, of the model's f32[R, V]. Rows without rules keep theirs.

    The branch is taken at run time, so one executable serves every mix.
    """
    has_rules = batch.sampling.has_rules

    def apply() -> jax.Array:
        return jnp.where(has_rules[:, None], _penalise(logits, rules, batch.slot), logits)

    return lax.cond(jnp.any(has_rules), apply, lambda: logits)


def _penalise(logits: jax.Array, rules: LogitRules, slot: jax.Array) -> jax.Array:
    """Repetition as in CTRL (Keskar et al. 2019, section 4.1), presence and frequency as OpenAI."""
    counts = rules.counts.at[slot].get(mode="fill", fill_value=0)  # i16[R, V]
    penalties = rules.penalties.at[slot].get(mode="fill", fill_value=1)
    presence, frequency, repetition = (penalties[:, i, None] for i in range(3))
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, repeated, logits)
    drawn = (counts >> 1).astype(jnp.float32)
    return logits - frequency * drawn - jnp.where(drawn > 0, presence, 0.0)
