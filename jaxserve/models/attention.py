"""Attention over the paged cache: the only module that knows how the cache is laid out.

A model calls `prepare` once a step and the returned function once a layer. Which kernel runs is
decided here, by name, before anything is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import jax.numpy as jnp

from checkpoints.model_config import ModelConfig
from jaxserve.batch import BatchDescriptor, LayerPages, PageTable
from pallas_kernels.cpu import paged_attention_cpu, plan_attention
from pallas_kernels.reference import paged_attention_reference, write_kv_reference

AttentionKind = Literal["cpu", "reference"]


class Attend(Protocol):
    """One layer's attention: stores k and v in the layer's pages, then attends over them."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pages: LayerPages,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[jax.Array, LayerPages]:
        """Args q [T, H, D], k and v [T, K, D]. Returns [T, H, D] and the pages."""
        ...


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The attention of a step, over pages of `page_size` tokens.

    Attributes:
        kind: "cpu" is plain jnp that works in proportion to the live context and runs on every
            backend; "reference" is the specification: dense, for tests.
    """

    kind: AttentionKind = "cpu"

    def prepare(self, batch: BatchDescriptor, page_table: PageTable, pages: LayerPages) -> Attend:
        """Do once what every layer of the step shares. `pages` is any layer's, for its shape."""
        num_pages, page_size = pages.k.shape[:2]
        slots = page_table.slots(batch, page_size, num_pages)
        run = self._kernel(batch, page_table)

        def attend(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            pages: LayerPages,
            *,
            scale: float,
            window: int | None,
        ) -> tuple[jax.Array, LayerPages]:
            k_pages, v_pages = write_kv_reference(pages.k, pages.v, k, v, slots)
            out = run(q, k_pages, v_pages, scale=scale, window=window)
            return out, LayerPages(k_pages, v_pages)

        return attend

    def _kernel(self, batch: BatchDescriptor, page_table: PageTable) -> Callable[..., jax.Array]:
        def reference(q, k_pages, v_pages, **settings):
            lengths = (page_table.pages, batch.row_start, batch.kv_len)
            return paged_attention_reference(q, k_pages, v_pages, *lengths, **settings)

        if self.kind == "reference":
            return reference
        plan = plan_attention(batch.row_start, batch.kv_len, batch.token_ids.shape[0])

        def cpu(q, k_pages, v_pages, **settings):
            lengths = (page_table.pages, batch.row_start, batch.kv_len)
            return paged_attention_cpu(q, k_pages, v_pages, *lengths, plan, **settings)

        return cpu


def empty_pages(
    config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype
) -> tuple[LayerPages, ...]:
    """A zeroed cache: L times k and v of [N, B, K, D], arrays of their own."""
    shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
    return tuple(
        LayerPages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in config.layers
    )


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes of cache one token takes over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
