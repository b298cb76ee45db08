"""Attention over the paged cache: the only module that knows how the cache is laid out.

A model calls `prepare` once a step and the returned function once a layer. Which kernel runs is
decided here, by name, before anything is traced.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, Protocol, cast, get_args

import jax
import jax.numpy as jnp

from checkpoints.model_config import ModelConfig
from jaxserve.batch import BatchDescriptor, LayerPages, PageTable
from jaxserve.errors import ConfigError
from pallas_kernels.cache_write import write_kv
from pallas_kernels.paged_attention import paged_attention, plan_attention
from pallas_kernels.target import Target, has_triton, local_target, runs_triton

logger = logging.getLogger("jaxserve.attention")

AttentionKind = Literal["cpu", "reference", "triton"]


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
    """The attention of a step.

    Attributes:
        kind: "cpu" is plain jnp that works in proportion to the live context and runs on every
            backend; "triton" is Pallas for NVIDIA GPUs; "reference" is the specification: dense,
            for tests.
        card: whose tiles "triton" takes, one of `pallas_kernels.tuned.CARDS`.
        interpret: run "triton" on a CPU, operation by operation.
    """

    kind: AttentionKind = "cpu"
    card: str = "sm_80"
    interpret: bool = False

    def prepare(
        self, batch: BatchDescriptor, page_table: PageTable, pages: LayerPages, *, num_heads: int
    ) -> Attend:
        """Do once what every layer of the step shares.

        Args:
            batch, page_table: the step's.
            pages: any layer's, for its shape.
            num_heads: H.
        """
        target = Target(self.kind, self.card, self.interpret)
        num_pages, page_size = pages.k.shape[:2]
        slots = page_table.slots(batch, page_size, num_pages)
        plan = plan_attention(
            batch.row_start,
            batch.kv_len,
            target=target,
            num_tokens=batch.token_ids.shape[0],
            num_heads=num_heads,
            pages=pages.k,
            max_pages=page_table.pages.shape[1],
            dtype=pages.k.dtype,
        )

        def attend(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            pages: LayerPages,
            *,
            scale: float,
            window: int | None,
        ) -> tuple[jax.Array, LayerPages]:
            k_pages, v_pages = write_kv((pages.k, pages.v), k, v, slots, target=target)
            out = paged_attention(
                q,
                k_pages,
                v_pages,
                page_table.pages,
                batch.row_start,
                batch.kv_len,
                target=target,
                plan=plan,
                scale=scale,
                window=window,
            )
            return out, LayerPages(k_pages, v_pages)

        return attend


def choose_attention(name: str) -> PagedAttention:
    """The attention for jax's default device.

    Args:
        name: an `AttentionKind`, or "auto": "triton" on an NVIDIA GPU that runs it, else "cpu".

    Raises:
        ConfigError: there is no such kind, or this jax does not have it.
    """
    device = jax.devices()[0]
    if name == "auto":
        name = "triton" if runs_triton(device) else "cpu"
        if device.platform != "cpu":
            logger.info("attention on %s: %s", device.device_kind, name)
    if name not in get_args(AttentionKind):
        kinds = ", ".join(("auto", *get_args(AttentionKind)))
        raise ConfigError(f"attention {name!r} is not one of {kinds}")
    if name == "triton" and not has_triton():
        logger.warning("jax %s has no Triton kernels: attention is plain jnp", jax.__version__)
        name = "cpu"
    target = local_target(cast(AttentionKind, name))
    return PagedAttention(target.dialect, target.card, target.interpret)


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
