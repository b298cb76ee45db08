"""Logits to tokens. A row's draw depends on its own logits, settings, seed and position only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.batch import MAX_TOP_LOGPROBS, NOT_FINITE, NOTHING_LEFT, SamplingArrays

BUCKET = 128
"""Tokens that are first looked at together: the best one is in the best bucket, and a token is
drawn from the bucket drawn."""


def sample(logits: jax.Array, positions: jax.Array, sampling: SamplingArrays) -> jax.Array:
    """Draw one token per row.

    Filters apply in the order temperature, min-p, top-k, top-p (over what the others left).
    Ties at a filter's edge are all kept. Steps in which every row is greedy, or no row filters,
    skip that work: the branch is taken at run time, so one executable serves every mix.

    Args:
        logits: f32[R, V].
        positions: i32[R], position in its sequence of the token to draw.
        sampling: settings, each [R].

    Returns:
        i32[R]; `NOT_FINITE` for rows with a logit of NaN or +infinity, `NOTHING_LEFT` for rows with
        none above -infinity.
    """
    likeliest, largest = _best(logits)

    def draw() -> jax.Array:
        hot = sampling.temperature > 0
        temperature = jnp.where(hot, sampling.temperature, 1.0)
        # Distance below the best: never overflows to NaN, however small the temperature.
        distance = (largest[:, None] - logits) / temperature[:, None]
        drawn = _draw(_filter(distance, sampling), positions, sampling.seed)
        return jnp.where(hot, drawn, likeliest)

    tokens = lax.cond(jnp.any(sampling.temperature > 0), draw, lambda: likeliest)
    return _or_fault(tokens, largest)


def greedy(logits: jax.Array) -> jax.Array:
    """What `sample` returns, i32[R], of f32[R, V] where no row has a temperature."""
    token_ids, largest = _best(logits)
    return _or_fault(token_ids, largest)


def _or_fault(token_ids: jax.Array, largest: jax.Array) -> jax.Array:
    """The tokens drawn, i32[R], or why there is none, by each row's largest logit."""
    fault = jnp.where(largest < 0, NOTHING_LEFT, NOT_FINITE)
    return jnp.where(jnp.isfinite(largest), token_ids, fault)


def token_logprobs(
    logits: jax.Array, token_ids: jax.Array, sampling: SamplingArrays
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities under the untempered, unfiltered model.

    Returns:
        f32[R] of `token_ids`, then i32[R, 20] and f32[R, 20] of the likeliest tokens, likeliest
        first; zeros at the end where V < 20. All zeros if no row asks for any.
    """
    return lax.cond(
        jnp.any(sampling.top_logprobs >= 0),
        lambda: likeliest(logits, token_ids),
        lambda: likeliest(None, token_ids),
    )


def likeliest(
    logits: jax.Array | None, token_ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `token_logprobs` returns, whoever asks, of f32[R, V] logits; zeros of None."""
    if logits is None:
        top = (token_ids.shape[0], MAX_TOP_LOGPROBS)
        return jnp.zeros(top[0]), jnp.zeros(top, jnp.int32), jnp.zeros(top)
    count = min(MAX_TOP_LOGPROBS, logits.shape[-1])
    pad = ((0, 0), (0, MAX_TOP_LOGPROBS - count))
    norm = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(token_ids, 0)[:, None], axis=-1)[:, 0]
    best, ids = lax.top_k(logits, count)
    return chosen - norm, jnp.pad(ids, pad), jnp.pad(best - norm[:, None], pad)


def _filter(distance: jax.Array, sampling: SamplingArrays) -> jax.Array:
    """f32[R, V] unnormalised probabilities, 0 for tokens filtered out."""

    def apply() -> jax.Array:
        probs = jnp.exp(-distance)
        # The best token has distance 0: min_p = 1 keeps exactly the best ones.
        kept = probs >= sampling.min_p[:, None]
        top_k = jnp.where(sampling.top_k > 0, sampling.top_k, distance.shape[-1])

        def keep_k() -> jax.Array:
            return kept & _closest(distance, jnp.ones_like(probs), top_k.astype(jnp.float32))

        def keep_p() -> jax.Array:
            left = jnp.where(kept, probs, 0.0)
            target = sampling.top_p * jnp.sum(left, axis=-1)
            # Rounding must not cut a row that keeps all.
            return kept & (_closest(distance, left, target) | (sampling.top_p >= 1)[:, None])

        kept = lax.cond(jnp.any(sampling.top_k > 0), keep_k, lambda: kept)
        kept = lax.cond(jnp.any(sampling.top_p < 1), keep_p, lambda: kept)
        return jnp.where(kept, probs, 0.0)

    active = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    return lax.cond(jnp.any(active), apply, lambda: jnp.exp(-distance))


def _closest(distance: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """bool[R, V]: the nearest tokens whose weights reach `target` f32[R].

    Finds each row's cut-off by bisection instead of sorting: non-negative floats order like
    their bit patterns, so 31 passes over the row are exact, and far cheaper than sorting V.
    """
    bits = lax.bitcast_convert_type(distance, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        mass = jnp.sum(jnp.where(bits <= middle[:, None], weight, 0.0), axis=-1)
        enough = mass >= target
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    infinity = jnp.full(target.shape, 0x7F800000, jnp.int32)
    _, cut = lax.fori_loop(0, 31, halve, (jnp.zeros_like(infinity), infinity))
    return bits <= cut[:, None]


def _draw(probs: jax.Array, positions: jax.Array, seed: jax.Array) -> jax.Array:
    """i32[R]: a draw from unnormalised f32[R, V], by inverting the distribution function twice.

    First a bucket of tokens, then a token within it, each with a uniform number of its own. Two
    numbers a row instead of V Gumbel variables: on a CPU those cost more than the rest of
    sampling together; and two stages resolve probabilities far below one number's 2^-23.
    """
    buckets = _in_buckets(probs, 0.0)
    uniform = jax.vmap(_uniform_pair)(seed, positions)
    bucket = _invert(jnp.sum(buckets, axis=-1), uniform[:, 0])
    return bucket * BUCKET + _invert(_take_bucket(buckets, bucket), uniform[:, 1])


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """i32[R]: index drawn with probability in proportion to f32[R, n]; never one of weight 0."""
    cumulative = jnp.cumsum(weights, axis=-1)
    target = uniform * cumulative[:, -1]
    # Rounding can lift the target to the total: fall back to the last index with weight.
    reached = (cumulative > target[:, None]) & (weights > 0)
    last = weights.shape[-1] - 1 - _first_index(weights[:, ::-1] > 0)
    return jnp.where(jnp.any(reached, axis=-1), _first_index(reached), last)


def _uniform_pair(seed: jax.Array, position: jax.Array) -> jax.Array:
    """f32[2] in [0, 1), a function of u32[2] and i32[] alone."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position), (2,))


def _best(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first of the largest logits of each row, i32[R], and its value f32[R]; that is +infinity
    in a row with a NaN. First the bucket it is in, then it: the logits are read but once."""
    buckets = _in_buckets(logits, -jnp.inf)
    # The maximum on a CPU passes over a NaN among other numbers.
    largest = jnp.max(jnp.where(jnp.isnan(buckets), jnp.inf, buckets), axis=-1)
    # XLA would take the maximum of maxima from the logits themselves.
    largest = lax.optimization_barrier(largest)
    best = jnp.max(largest, axis=-1)
    bucket = _first_index(largest == best[:, None])
    inside = _take_bucket(buckets, bucket)
    return bucket * BUCKET + _first_index(inside == best[:, None]), best


def _in_buckets(x: jax.Array, padding: float) -> jax.Array:
    """[R, V] as [R, buckets, BUCKET]."""
    num_rows, vocab_size = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -vocab_size % BUCKET)), constant_values=padding)
    return padded.reshape(num_rows, -1, BUCKET)


def _take_bucket(buckets: jax.Array, index: jax.Array) -> jax.Array:
    """[R, BUCKET]: of each row's [buckets, BUCKET] the one of i32[R]."""
    return jnp.take_along_axis(buckets, index[:, None, None], axis=1)[:, 0]


def _first_index(found: jax.Array) -> jax.Array:
    """i32[R]: first True of bool[R, n]; n - 1 if there is none. XLA's argmax is far slower."""
    index = jnp.arange(found.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(found, index[None], index[-1]), axis=-1)
