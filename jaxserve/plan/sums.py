"""The textbook's sums about batching and memory, one line each."""

from __future__ import annotations

from collections.abc import Sequence


def max_sequences(memory_bytes: float, kv_bytes_per_token: float, context: float) -> int:
    """Sequences of `context` tokens whose keys and values fit.

    60 GB hold 457 sequences of 1,000 tokens at 128 KiB a token ("about 460"), and 114 at the
    512 KiB of a model without grouped heads. A textbook that counts KiB as 1,000 bytes gets 117.
    """
    return int(memory_bytes / (kv_bytes_per_token * context))


def over_reservation(reserved_tokens: int, used_tokens: float) -> float:
    """Share of a reservation that stays empty: what paging gives back.

    A sequence of 1,000 tokens in room reserved for 32,768 leaves 97% unused, and so does one of
    240 in 8,192.
    """
    return 1 - used_tokens / reserved_tokens


def static_batch_utilisation(outputs: Sequence[int]) -> float:
    """Share of a batch's decode rows that draw a wanted token if all wait for the longest output.

    Seven outputs of 50 tokens beside one of 1,000: (7 * 50 + 1000) / (8 * 1000) = 17%.
    """
    return sum(outputs) / (len(outputs) * max(outputs))


def shared_prompt_saving(kv_bytes_per_token: float, prompt_tokens: int, requests: int) -> float:
    """Bytes of cache saved when requests share one copy of a prompt they begin with.

    2,000 tokens at 128 KiB for 100 requests: 99 copies, 26.0 GB; with KiB counted as 1,000 bytes
    the textbook's 25 GB.
    """
    return kv_bytes_per_token * prompt_tokens * (requests - 1)
