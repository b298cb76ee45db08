"""The arrays of one step. Everything here crosses into `jit`; nothing here is ever None.

Letters: T tokens in a step, R rows (sequences in a step), P pages a row may hold, N pages in the
cache, B tokens per page, L layers, K KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LISTED_TOKENS,
    MAX_TOP_LOGPROBS,
    MAX_WAITING_STOPS,
    NOT_FINITE,
    NOTHING_LEFT,
)

NULL_PAGE = 0
"""Page 0 belongs to nobody: unused entries of a page table point here."""
MAX_COUNT = 2**14 - 1
"""Times a token is counted at most: what fits an i16 beside the bit of the prompt."""
NO_TOKEN = -1
"""Stands where a list of tokens has fewer."""
NUM_LISTED = MAX_LISTED_TOKENS + MAX_BAD_WORDS + MAX_WAITING_STOPS
"""S: tokens with a rule of their own, at most; each of these limits holds by itself."""
NUM_WORDS, WORD_TOKENS = MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS
POOL_LAST, POOL_SUM = 1, 2
"""What is wanted of a row's hidden states, if anything is."""
MASK_BITS = 32
"""Tokens in a word of a mask."""


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """What an executable is compiled for.

    Attributes:
        num_tokens: T. num_rows: R. max_pages: P. page_size: B.
    """

    num_tokens: int
    num_rows: int
    max_pages: int
    page_size: int


@struct.dataclass
class SamplingArrays:
    """Every sampling setting of every row. Neutral values leave the distribution alone.

    Attributes:
        temperature: f32[R], 0 is greedy.
        top_k: i32[R], 0 keeps all.
        top_p: f32[R], 1 keeps all.
        min_p: f32[R], 0 keeps all.
        seed: u32[R, 2], high and low half.
        top_logprobs: i32[R], alternatives wanted; -1 wants no log-probabilities.
        has_rules: bool[R], the rules of the row's slot apply. The others' mean nothing.
        is_constrained: bool[R], only what is `allowed` in the row's slot may be drawn.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    top_logprobs: jax.Array
    has_rules: jax.Array
    is_constrained: jax.Array


@struct.dataclass
class BatchDescriptor:
    """The tokens of one step, prefill and decode alike, packed row after row.

    Row r owns tokens `row_start[r]:row_start[r + 1]`, the last ones of its sequence so far.
    Tokens past the last row are padding: their row id is R, which no row has.

    Attributes:
        token_ids: i32[T].
        positions: i32[T], index of each token in its own sequence.
        row_ids: i32[T], the row that owns each token.
        row_start: i32[R + 1], prefix sum of the tokens per row.
        kv_len: i32[R], tokens in the cache once this step has run. 0 marks an empty row.
        slot: i32[R], the row's place in per-sequence device state. Empty rows: out of range.
        feed: bool[R], the row's last token is the one sampled for its slot in an earlier step,
            which the host has not seen yet; its entry in `token_ids` means nothing.
        next_token: i32[R], the token of the prompt that follows the row's last one, 0 at its end;
            `NO_TOKEN` if nobody wants the log-probabilities of the prompt.
        pooling: i32[R], POOL_LAST or POOL_SUM where the row's hidden states are asked for, else 0.
        sampling: per-row settings, each [R].
    """

    token_ids: jax.Array
    positions: jax.Array
    row_ids: jax.Array
    row_start: jax.Array
    kv_len: jax.Array
    slot: jax.Array
    feed: jax.Array
    next_token: jax.Array
    pooling: jax.Array
    sampling: SamplingArrays

    @property
    def last_token(self) -> jax.Array:
        """i32[R]: index in [0, T) of each row's last token. Of no meaning for an empty row."""
        return jnp.maximum(self.row_start[1:] - 1, 0)

    @property
    def is_padding(self) -> jax.Array:
        """bool[T]: tokens that no row owns."""
        return jnp.arange(self.token_ids.shape[0]) >= self.row_start[-1]

    def last_hidden(self, hidden: jax.Array) -> jax.Array:
        """[R, E]: hidden states [T, E] of each row's last token, 0 for an empty row."""
        return jnp.where(self.kv_len[:, None] > 0, hidden[self.last_token], 0)

    def fed_token_ids(self, last_token: jax.Array) -> jax.Array:
        """i32[T]: `token_ids` with the fed rows' tokens filled in from i32[slots]."""
        place = jnp.where(self.feed, self.last_token, self.token_ids.shape[0])
        return self.token_ids.at[place].set(self.fed(last_token), mode="drop")

    def fed(self, last_token: jax.Array) -> jax.Array:
        """i32[R]: what i32[slots] has for each row's slot, 0 for an empty row."""
        return last_token.at[self.slot].get(mode="fill", fill_value=0)


@struct.dataclass
class PageTable:
    """Where each row keeps its keys and values.

    Attributes:
        pages: i32[R, P]. `pages[r, j]` holds tokens `[j * B, (j + 1) * B)` of row r. Entries
            past the last page are `NULL_PAGE`.
    """

    pages: jax.Array

    def slots(self, batch: BatchDescriptor, page_size: int, num_pages: int) -> jax.Array:
        """i32[T]: place of each token in a cache read as [N * B]. Padding gets N * B: no place."""
        page, offset = batch.positions // page_size, batch.positions % page_size
        page_ids = self.pages.at[batch.row_ids, page].get(mode="fill", fill_value=num_pages)
        return jnp.where(page_ids < num_pages, page_ids * page_size + offset, num_pages * page_size)


@struct.dataclass
class LayerPages:
    """One layer's part of the cache. Arrays of their own per layer: a slice of a stacked array
    handed to a dot or a kernel would be a copy.

    Attributes:
        k: [N, B, K, D]. v: [N, B, K, D].
        scales: of k and v, f32[N, B, K] each, what every head of every token was divided by, where
            they are int8; else empty.
    """

    k: jax.Array
    v: jax.Array
    scales: tuple[jax.Array, ...] = ()


@struct.dataclass
class LogitRules:
    """What requests do to their logits besides `SamplingArrays`: one place for each slot.

    Written when a sequence with rules gets its first token in a slot, kept up by the steps, and
    read only by steps in which a row has rules. Whoever has none leaves its slot as it was.

    Attributes:
        counts: i16[slots, V], twice how often a token has been drawn, plus 1 if the prompt has it.
        penalties: f32[slots, 3], presence, frequency and repetition; 0, 0 and 1 do nothing.
        token_ids: i32[slots, S], tokens with a rule of their own, each once; `NO_TOKEN` at the end.
        bias: f32[slots, S], added to their logits; -infinity bans.
        banned_until: i32[slots, S], they are banned from positions below.
        only_listed: bool[slots], every other token is banned.
        bad_words: i32[slots, W, 16], tokens that may not follow each other, `NO_TOKEN` in front.
        recent: i32[slots, 15], the newest tokens drawn, the newest last, `NO_TOKEN` in front.
        allowed: u32[slots, ceil(V / 32)], a bit for each token that a constraint allows now: token
            t is bit t % 32 of word t // 32. Of meaning for constrained rows only, and written
            before every step that has some.
    """

    counts: jax.Array
    penalties: jax.Array
    token_ids: jax.Array
    bias: jax.Array
    banned_until: jax.Array
    only_listed: jax.Array
    bad_words: jax.Array
    recent: jax.Array
    allowed: jax.Array


@struct.dataclass
class DeviceState:
    """What lives on the device from step to step. Donated: a step updates it in place.

    Attributes:
        layers: L caches.
        last_token: i32[slots], the newest token sampled for each sequence slot.
        rules: what a sequence's settings do to its logits, for each slot.
    """

    layers: tuple[LayerPages, ...]
    last_token: jax.Array
    rules: LogitRules


@struct.dataclass
class PromptScores:
    """Of every token of a step, about the token after it. Zeros where nobody asked.

    Attributes:
        logprobs: f32[T], natural log-probability of the token that follows in the prompt.
        top_ids: i32[T, MAX_TOP_LOGPROBS], the likeliest tokens, likeliest first.
        top_logprobs: f32[T, MAX_TOP_LOGPROBS], theirs.
    """

    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@struct.dataclass
class StepOutput:
    """What one step tells the host.

    Attributes:
        token_ids: i32[R], the token drawn after each row's last one; `NOT_FINITE` where the row's
            logits were not, `NOTHING_LEFT` where every token was banned. Means nothing for rows
            whose prompt is not complete.
        logprobs: f32[R], its natural log-probability under the untempered model.
        top_ids: i32[R, MAX_TOP_LOGPROBS], the likeliest tokens, likeliest first.
        top_logprobs: f32[R, MAX_TOP_LOGPROBS], theirs. Logprob fields are zeros in a step where
            no row asked for them.
        prompt: `PromptScores`; () of a step that cannot tell: requests that ask are refused then.
        pooled: f32[R, E], the last hidden state or the sum of those of the step's tokens, as the
            row asked; () of a step that cannot tell, as with `prompt`.
        aux: whatever else a step function returns, any pytree. The default step returns ().
    """

    token_ids: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    prompt: PromptScores | tuple[()] = ()
    pooled: jax.Array | tuple[()] = ()
    aux: Any = ()


__all__ = [
    "MASK_BITS",
    "MAX_COUNT",
    "MAX_TOP_LOGPROBS",
    "NOTHING_LEFT",
    "NOT_FINITE",
    "NO_TOKEN",
    "NULL_PAGE",
    "NUM_LISTED",
    "NUM_WORDS",
    "POOL_LAST",
    "POOL_SUM",
    "WORD_TOKENS",
    "BatchDescriptor",
    "DeviceState",
    "LayerPages",
    "LogitRules",
    "PageTable",
    "PromptScores",
    "SamplingArrays",
    "StepOutput",
    "StepShape",
]
