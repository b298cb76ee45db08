"""Spans to the arrays of a step. numpy only: what leaves here has not touched a device."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from jaxserve.batch import (
    MASK_BITS,
    MAX_COUNT,
    NO_TOKEN,
    NULL_PAGE,
    NUM_LISTED,
    NUM_WORDS,
    POOL_LAST,
    POOL_SUM,
    WORD_TOKENS,
    BatchDescriptor,
    LogitRules,
    PageTable,
    SamplingArrays,
    StepShape,
)
from jaxserve.request import SamplingParams
from jaxserve.sequence import Sequence, Span

NEUTRAL = SamplingParams(max_tokens=1)


def step_shapes(
    *, max_rows: int, token_budget: int, max_context: int, page_size: int
) -> tuple[StepShape, ...]:
    """The ladder of shapes a server compiles, smallest first.

    Token counts are the powers of two below the budget, and the budget; 2 is left out, since a
    step of 2 tokens takes as long as one of 4: both are spent reading the weights. A step of T
    tokens has at most T rows, so one ladder serves decodes, prefill chunks and any mixture.
    """
    counts = [1 << i for i in range(token_budget.bit_length()) if i != 1]
    counts = [count for count in counts if count < token_budget]
    max_pages = -(-max_context // page_size)
    return tuple(
        StepShape(count, min(count, max_rows), max_pages, page_size)
        for count in (*counts, token_budget)
    )


def choose_shape(shapes: Seq[StepShape], spans: Seq[Span]) -> StepShape:
    """The smallest shape, of `shapes` in rising order, that holds the spans.

    Raises ValueError if none does.
    """
    num_tokens = sum(span.num_tokens for span in spans)
    for shape in shapes:
        if num_tokens <= shape.num_tokens and len(spans) <= shape.num_rows:
            return shape
    largest = max(shapes)
    raise ValueError(
        f"a step of {num_tokens} tokens in {len(spans)} rows does not fit the largest shape, "
        f"{largest.num_tokens} tokens in {largest.num_rows} rows"
    )


def pack(spans: Seq[Span], shape: StepShape) -> tuple[BatchDescriptor, PageTable]:
    """Lay the spans out row after row at `shape`, in the order given; the rest is padding.

    Returns:
        numpy arrays in the device types, dtypes and shapes as those document.
    """
    num_rows = len(spans)
    lengths = np.zeros(shape.num_rows, np.int32)
    lengths[:num_rows] = [span.num_tokens for span in spans]
    row_start = np.zeros(shape.num_rows + 1, np.int32)
    np.cumsum(lengths, out=row_start[1:])
    used = int(row_start[-1])

    first = np.zeros(shape.num_rows, np.int32)
    first[:num_rows] = [span.start for span in spans]
    row_ids = np.full(shape.num_tokens, shape.num_rows, np.int32)
    row_ids[:used] = np.repeat(np.arange(shape.num_rows, dtype=np.int32), lengths)
    positions = np.zeros(shape.num_tokens, np.int32)
    positions[:used] = np.arange(used, dtype=np.int32) + np.repeat(first - row_start[:-1], lengths)

    # Empty rows point past the last slot: reads give nothing, writes go nowhere.
    slot = np.full(shape.num_rows, np.iinfo(np.int32).max, np.int32)
    slot[:num_rows] = [span.sequence.slot for span in spans]
    feed = np.zeros(shape.num_rows, np.bool_)
    feed[:num_rows] = [span.feed for span in spans]
    batch = BatchDescriptor(
        token_ids=_token_ids(spans, row_start, shape.num_tokens),
        positions=positions,
        row_ids=row_ids,
        row_start=row_start,
        kv_len=first + lengths,
        slot=slot,
        feed=feed,
        next_token=_next_tokens(spans, shape.num_rows),
        pooling=_pooling(spans, shape.num_rows),
        sampling=sampling_arrays(
            [span.sequence.request.sampling if span.draws else NEUTRAL for span in spans],
            shape.num_rows,
        ),
    )
    return batch, _page_table(spans, shape)


def _token_ids(spans: Seq[Span], row_start: np.ndarray, num_tokens: int) -> np.ndarray:
    token_ids = np.zeros(num_tokens, np.int32)
    for span, start in zip(spans, row_start.tolist(), strict=False):
        if span.feed:
            continue
        if span.num_tokens == 1:
            token_ids[start] = span.sequence.tokens[span.start]
        else:
            tokens = np.frombuffer(span.sequence.tokens, np.int32)
            token_ids[start : start + span.num_tokens] = tokens[span.start : span.stop]
    return token_ids


def _next_tokens(spans: Seq[Span], num_rows: int) -> np.ndarray:
    following = np.full(num_rows, NO_TOKEN, np.int32)
    for row, span in enumerate(spans):
        if not span.feed and span.scores_prompt:  # what is fed is no token of a prompt
            prompt = span.sequence.request.prompt_ids
            following[row] = prompt[span.stop] if span.stop < len(prompt) else 0
    return following


def _pooling(spans: Seq[Span], num_rows: int) -> np.ndarray:
    kinds = np.zeros(num_rows, np.int32)
    for row, span in enumerate(spans):
        if span.pools is not None:
            kinds[row] = POOL_SUM if span.pools == "mean" else POOL_LAST
    return kinds


def _page_table(spans: Seq[Span], shape: StepShape) -> PageTable:
    pages = np.full((shape.num_rows, shape.max_pages), NULL_PAGE, np.int32)
    held = [span.sequence.pages for span in spans]
    # All rows at once: boolean indexing fills row after row, in the order the pages are joined.
    lengths = np.fromiter(map(len, held), np.int32, len(held))
    owned = np.arange(shape.max_pages, dtype=np.int32) < lengths[:, None]
    pages[: len(held)][owned] = np.frombuffer(b"".join(held), np.int32)
    return PageTable(pages)


def sampling_arrays(settings: Seq[SamplingParams], num_rows: int) -> SamplingArrays:
    """Settings of the first rows as arrays of `num_rows`; the other rows are neutral."""
    padded = [*settings, *[NEUTRAL] * (num_rows - len(settings))]
    seeds = np.array([s.seed for s in padded], np.uint64)
    return SamplingArrays(
        temperature=np.array([s.temperature for s in padded], np.float32),
        top_k=np.array([s.top_k for s in padded], np.int32),
        top_p=np.array([s.top_p for s in padded], np.float32),
        min_p=np.array([s.min_p for s in padded], np.float32),
        seed=np.stack([seeds >> np.uint64(32), seeds], axis=-1).astype(np.uint32),
        top_logprobs=np.array(
            [-1 if s.top_logprobs is None else s.top_logprobs for s in padded], np.int32
        ),
        has_rules=np.array([s.has_rules for s in padded], np.bool_),
        is_constrained=np.array([s.constraint is not None for s in padded], np.bool_),
    )


def pack_rules(sequence: Sequence, vocab_size: int) -> LogitRules:
    """A sequence's rules for one slot; all of its tokens must be known."""
    sampling, tokens = sequence.request.sampling, np.frombuffer(sequence.tokens, np.int32)
    prompt, output = tokens[: sequence.num_prompt], tokens[sequence.num_prompt :]
    counts = np.bincount(output, minlength=vocab_size)
    counts = np.minimum(counts, MAX_COUNT).astype(np.int16) * np.int16(2)
    counts[prompt] |= 1
    penalties = (
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    listed = sampling.listed_tokens()
    first_stop = len(prompt) + sampling.min_tokens
    waits = [first_stop if waits else 0 for _, waits in listed.values()]
    words = [word for word in sampling.bad_words if len(word) > 1]
    bad_words = np.full((NUM_WORDS, WORD_TOKENS), NO_TOKEN, np.int32)
    for row, word in zip(bad_words, words, strict=False):
        row[-len(word) :] = word
    recent = np.full(WORD_TOKENS - 1, NO_TOKEN, np.int32)
    newest = output[-len(recent) :]
    recent[len(recent) - len(newest) :] = newest
    return LogitRules(
        counts=counts,
        penalties=np.array(penalties, np.float32),
        token_ids=_padded(list(listed), NO_TOKEN, np.int32),
        bias=_padded([bias for bias, _ in listed.values()], 0, np.float32),
        banned_until=_padded(waits, 0, np.int32),
        only_listed=np.array(sampling.allowed_token_ids is not None),
        bad_words=bad_words,
        recent=recent,
        allowed=np.zeros(-(-vocab_size // MASK_BITS), np.uint32),
    )


def _padded(values: Seq[float], fill: float, dtype: type) -> np.ndarray:
    padded: np.ndarray = np.full(NUM_LISTED, fill, dtype)
    padded[: len(values)] = values
    return padded
