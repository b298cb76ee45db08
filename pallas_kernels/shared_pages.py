"""Decodes that keep the same keys in the same pages: found on the device, once a step.

Knows nothing of why: requests that begin alike, samples of one prompt, a page table made by hand.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def split_leaders(
    page_table: jax.Array,
    kv_len: jax.Array,
    split_len: jax.Array,
    decodes: jax.Array,
    *,
    page_size: int,
    max_splits: int,
) -> jax.Array:
    """For each split of each row, the first row that keeps the same keys in the same pages.

    A row leads its own split unless both rows own all of it, cut it alike, and hold every page of
    it in common. Candidates are found by a split's last page: what begins alike and ends alike is
    alike. Rows that have it in common and yet differ from their leader are left to themselves.

    Args:
        page_table: i32[R, P]. kv_len: i32[R]. As in `paged_attention`.
        split_len: i32[R], keys per split of each row, whole pages.
        decodes: bool[R], rows that are cut into splits.
        page_size: B.
        max_splits: S.

    Returns:
        i32[R, S]. Of no meaning for splits that a row does not have.
    """
    num_rows, max_pages = page_table.shape
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    split = jnp.arange(max_splits, dtype=jnp.int32)[None]
    split_pages = split_len[:, None] // page_size
    first = jnp.minimum(split * split_pages, max_pages)
    last = jnp.minimum(first + split_pages, max_pages)
    whole = decodes[:, None] & ((split + 1) * split_len[:, None] <= kv_len[:, None])  # [R, S]
    page = jnp.take_along_axis(page_table, last - 1, axis=1)

    alike = (page[:, None] == page[None]) & whole[:, None] & whole[None]  # [R, R, S]
    alike &= (split_len[:, None] == split_len[None])[:, :, None]
    leader = jnp.where(whole, jnp.argmax(alike, axis=0).astype(jnp.int32), row)

    entry = jnp.arange(max_pages, dtype=jnp.int32)[None]
    split_of_entry = jnp.minimum(entry // split_pages, max_splits - 1)  # [R, P]
    theirs = page_table[jnp.take_along_axis(leader, split_of_entry, axis=1), entry]
    differing = jnp.cumsum(page_table != theirs, axis=1, dtype=jnp.int32)
    before = jnp.pad(differing, ((0, 0), (1, 0)))  # [R, P + 1], in entries up to each
    same = jnp.take_along_axis(before, last, 1) == jnp.take_along_axis(before, first, 1)
    return jnp.where(same, leader, row)
