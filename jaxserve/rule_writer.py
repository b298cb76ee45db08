"""The rules of a sequence, written into its slot when it starts to draw there.

A drawing span that is not fed is one all of whose tokens the host knows: its rules are written
anew, counts of prompt and output included. Later spans of the slot are fed, and the steps count
what they were fed. So whatever happened before (shared pages, a preemption, a swap, another
sequence in the slot) leaves no trace.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch import (
    MASK_BITS,
    NO_TOKEN,
    NUM_LISTED,
    NUM_WORDS,
    WORD_TOKENS,
    DeviceState,
    LogitRules,
)
from jaxserve.packing import pack_rules
from jaxserve.sequence import Span


def empty_rules(num_slots: int, vocab_size: int) -> LogitRules:
    """Rules that do nothing, on the device."""

    def full(*shape: int, value: float, dtype: Any) -> jax.Array:
        return jnp.full((num_slots, *shape), value, dtype)

    return LogitRules(
        counts=full(vocab_size, value=0, dtype=jnp.int16),
        penalties=jnp.tile(jnp.array([0.0, 0.0, 1.0]), (num_slots, 1)),
        token_ids=full(NUM_LISTED, value=NO_TOKEN, dtype=jnp.int32),
        bias=full(NUM_LISTED, value=0, dtype=jnp.float32),
        banned_until=full(NUM_LISTED, value=0, dtype=jnp.int32),
        only_listed=full(value=False, dtype=jnp.bool_),
        bad_words=full(NUM_WORDS, WORD_TOKENS, value=NO_TOKEN, dtype=jnp.int32),
        recent=full(WORD_TOKENS - 1, value=NO_TOKEN, dtype=jnp.int32),
        allowed=full(-(-vocab_size // MASK_BITS), value=0, dtype=jnp.uint32),
    )


def rule_bytes(num_slots: int, vocab_size: int) -> int:
    """Memory that `empty_rules` takes."""
    rules = jax.eval_shape(lambda: empty_rules(num_slots, vocab_size))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(rules))


class RuleWriter:
    """Writes rules into slots. Compiled ahead of time, like the steps."""

    def __init__(self, state: DeviceState) -> None:
        """Compiles for a state like this one, unless that was done before."""
        leaves, structure = jax.tree.flatten(state.rules)
        specs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves)
        self._vocab_size = state.rules.counts.shape[1]
        self._write = _compile(structure, specs)

    def write(self, state: DeviceState, spans: Seq[Span]) -> DeviceState:
        """Write the rules of the sequences that start to draw. Consumes the state's rules."""
        rules = state.rules
        for span in spans:
            sequence = span.sequence
            if span.draws and not span.feed and sequence.request.sampling.has_rules:
                own = jax.device_put(pack_rules(sequence, self._vocab_size))
                rules = self._write(rules, np.int32(sequence.slot), own)
        return DeviceState(state.layers, state.last_token, rules)


@functools.cache
def _compile(structure: jax.tree_util.PyTreeDef, leaves: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    rules = jax.tree.unflatten(structure, leaves)
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rules)
    slot = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.jit(_put, donate_argnums=0).lower(rules, slot, own).compile()


def _put(rules: LogitRules, slot: jax.Array, own: LogitRules) -> LogitRules:
    return jax.tree.map(lambda every, one: every.at[slot].set(one), rules, own)
