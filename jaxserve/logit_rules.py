"""What a request's rules do to its logits before a token is drawn, in this order: bans and biases
of tokens, bad words, penalties; then what a constraint does not allow is banned.

Whatever is in `LogitRules`, a step in which no row has rules reads and computes nothing of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.batch import (
    MASK_BITS,
    MAX_COUNT,
    NO_TOKEN,
    BatchDescriptor,
    LogitRules,
    SamplingArrays,
)

NOWHERE = 2**31 - 1
"""No slot, and no token: what is written there is dropped."""


def count_fed(rules: LogitRules, last_token: jax.Array, batch: BatchDescriptor) -> LogitRules:
    """The rules after this step's fed tokens, the ones the host could not know when it wrote them.

    Args:
        rules: of all slots; changed in place where the step's arguments are donated.
        last_token: i32[slots].
        batch: the step's batch.
    """
    fed = batch.fed(last_token)
    slot = jnp.where(batch.feed & batch.sampling.has_rules, batch.slot, NOWHERE)
    count = rules.counts.at[slot, fed].get(mode="fill", fill_value=0)
    count = jnp.where(count < 2 * MAX_COUNT, count + jnp.int16(2), count)
    counts = rules.counts.at[slot, fed].set(count, mode="drop")
    recent = rules.recent.at[slot].get(mode="fill", fill_value=NO_TOKEN)
    recent = jnp.concatenate([recent[:, 1:], fed[:, None]], axis=-1)
    recent = rules.recent.at[slot].set(recent, mode="drop")
    return LogitRules(**(vars(rules) | {"counts": counts, "recent": recent}))


def apply_rules(
    logits: jax.Array,
    rules: LogitRules,
    positions: jax.Array,
    slot: jax.Array,
    sampling: SamplingArrays,
) -> jax.Array:
    """f32[R, V]: the logits to draw from. Rows without rules keep those of the model.

    The branches are taken at run time, so one executable serves every mix.

    Args:
        logits: the model's, f32[R, V].
        rules: of all slots.
        positions: i32[R], position in its sequence of the token to draw.
        slot: i32[R], each row's.
        sampling: settings, each [R].
    """
    has_rules, constrained = sampling.has_rules, sampling.is_constrained

    def apply() -> jax.Array:
        ruled = _list_tokens(logits, rules, positions, slot)
        ruled = _ban_words(ruled, rules, slot)
        ruled = _penalise(ruled, rules, slot)
        return jnp.where(has_rules[:, None], ruled, logits)

    def constrain() -> jax.Array:
        banned = ~_unpack(rules.allowed.at[slot].get(mode="fill", fill_value=0), logits)
        return jnp.where(banned & constrained[:, None], -jnp.inf, ruled)

    ruled = lax.cond(jnp.any(has_rules), apply, lambda: logits)
    return lax.cond(jnp.any(constrained), constrain, lambda: ruled)


def _unpack(masks: jax.Array, logits: jax.Array) -> jax.Array:
    """bool[R, V]: the bits of u32[R, ceil(V / 32)], for the f32[R, V] they are about."""
    place = jnp.arange(MASK_BITS, dtype=jnp.uint32)[None, None]
    bits = (masks[:, :, None] >> place) & 1
    return bits.astype(jnp.bool_).reshape(len(masks), -1)[:, : logits.shape[1]]


def _list_tokens(
    logits: jax.Array, rules: LogitRules, positions: jax.Array, slot: jax.Array
) -> jax.Array:
    """Each listed token's own rule; in some rows all others are banned."""
    ids, bias, until = (
        x.at[slot].get(mode="fill", fill_value=NO_TOKEN)
        for x in (rules.token_ids, rules.bias, rules.banned_until)
    )
    only_listed = rules.only_listed.at[slot].get(mode="fill", fill_value=False)
    own = jnp.take_along_axis(logits, jnp.maximum(ids, 0), axis=-1) + bias
    own = jnp.where(positions[:, None] < until, -jnp.inf, own)  # [R, S]
    others = jnp.where(only_listed[:, None], -jnp.inf, logits)
    return others.at[_rows(ids), _places(ids)].set(own, mode="drop")


def _ban_words(logits: jax.Array, rules: LogitRules, slot: jax.Array) -> jax.Array:
    """Ban the tokens that would complete a bad word."""
    words = rules.bad_words.at[slot].get(mode="fill", fill_value=NO_TOKEN)  # [R, W, 16]
    recent = rules.recent.at[slot].get(mode="fill", fill_value=NO_TOKEN)
    begun = (words[:, :, :-1] == NO_TOKEN) | (words[:, :, :-1] == recent[:, None])
    last = jnp.where(jnp.all(begun, axis=-1), words[:, :, -1], NO_TOKEN)  # [R, W]
    return logits.at[_rows(last), _places(last)].set(-jnp.inf, mode="drop")


def _rows(ids: jax.Array) -> jax.Array:
    """i32[R, 1]: the row of each of i32[R, n] tokens."""
    return jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]


def _places(ids: jax.Array) -> jax.Array:
    """Tokens as indices: a negative one would count from the end."""
    return jnp.where(ids == NO_TOKEN, NOWHERE, ids)


def _penalise(logits: jax.Array, rules: LogitRules, slot: jax.Array) -> jax.Array:
    """Repetition as in CTRL (Keskar et al. 2019, section 4.1), presence and frequency as OpenAI."""
    counts = rules.counts.at[slot].get(mode="fill", fill_value=0)  # i16[R, V]
    penalties = rules.penalties.at[slot].get(mode="fill", fill_value=1)
    presence, frequency, repetition = (penalties[:, i, None] for i in range(3))
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, repeated, logits)
    drawn = (counts >> 1).astype(jnp.float32)
    return logits - frequency * drawn - jnp.where(drawn > 0, presence, 0.0)
