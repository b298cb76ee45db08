"""Attention over the paged cache: the only module that knows how the cache is laid out.

A model calls `prepare` once a step and the returned function once a layer. Which kernel runs is
decided here, by name, before anything is traced.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, cast, get_args

import jax
import jax.numpy as jnp

from checkpoints.model_config import ModelConfig
from jaxserve.batch import BatchDescriptor, LayerPages, PageTable
from jaxserve.errors import ConfigError
from pallas_kernels.cache_write import write_kv
from pallas_kernels.check import MAX_INT8_ELEMENTS
from pallas_kernels.mosaic.support import Wanted
from pallas_kernels.native.build import has_native
from pallas_kernels.paged_attention import paged_attention, plan_attention
from pallas_kernels.rope import Rope
from pallas_kernels.target import Target, has_triton, local_target, runs_mosaic, runs_triton

logger = logging.getLogger("jaxserve.attention")

ANYTHING = Wanted(128, 1, 16, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))

AttentionKind = Literal["cpu", "native", "reference", "triton", "mosaic"]


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
        rope: Rope | None = None,
    ) -> tuple[jax.Array, LayerPages]:
        """Args q [T, H, D], k and v [T, K, D], and by what q and k are still to be turned.
        Returns [T, H, D] and the pages."""
        ...


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The attention of a step.

    Attributes:
        kind: "cpu" is plain jnp that works in proportion to the live context and runs on every
            backend; "native" is C++ for CPUs; "triton" is Pallas for NVIDIA GPUs, "mosaic"
            Pallas for Hopper alone; "reference" is the specification: dense, for tests.
        card: whose tiles "triton" takes, one of `pallas_kernels.tuned.CARDS`.
        interpret: run "triton" or "mosaic" on a CPU, operation by operation.
    """

    kind: AttentionKind = "cpu"
    card: str = "sm_80"
    interpret: bool = False

    def prepare(
        self,
        batch: BatchDescriptor,
        page_table: PageTable,
        pages: LayerPages,
        *,
        num_heads: int,
        dtype: jnp.dtype,
    ) -> Attend:
        """Do once what every layer of the step shares.

        Args:
            batch, page_table: the step's.
            pages: any layer's, for its shape.
            num_heads: H. dtype: of the queries.
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
            page_table=page_table.pages,
            dtype=dtype,
        )

        def attend(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            pages: LayerPages,
            *,
            scale: float,
            window: int | None,
            rope: Rope | None = None,
        ) -> tuple[jax.Array, LayerPages]:
            cache = (pages.k, pages.v, *pages.scales)
            k_pages, v_pages, *scales = write_kv(cache, k, v, slots, target=target, rope=rope)
            k_scale, v_scale = scales or (None, None)
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
                k_scale=k_scale,
                v_scale=v_scale,
                rope=rope,
            )
            return out, LayerPages(k_pages, v_pages, tuple(scales))

        return attend


def choose_attention(name: str, wanted: Wanted | None = None) -> PagedAttention:
    """The attention for jax's default device.

    Args:
        name: an `AttentionKind`, or "auto": "triton" on an NVIDIA GPU that runs it, where this jax
            has none "mosaic" on a Hopper, "native" on a CPU where a C++ compiler is installed, else
            "cpu".
        wanted: by the model and its cache. None: nothing that "mosaic" could not do.

    Raises:
        ConfigError: there is no such kind, or neither this jax nor the device has it.
    """
    device = jax.devices()[0]
    if name == "auto":
        if device.platform == "cpu":
            name = "native" if has_native() else "cpu"
        else:
            name = "triton" if runs_triton(device) else _without_triton(device, wanted)
            logger.info("attention on %s: %s", device.device_kind, name)
    if name not in get_args(AttentionKind):
        kinds = ", ".join(("auto", *get_args(AttentionKind)))
        raise ConfigError(f"attention {name!r} is not one of {kinds}")
    if name == "native" and not (device.platform == "cpu" and has_native()):
        raise ConfigError("attention 'native' needs a CPU and a C++ compiler: 'cpu' needs neither")
    if name == "triton" and not has_triton():
        name = _without_triton(device, wanted)
        logger.warning("jax %s has no Triton kernels: attention is %s", jax.__version__, name)
    if name == "mosaic" and (refusal := _mosaic_refusal(device, wanted)):
        raise ConfigError(f"attention 'mosaic': {refusal}; 'auto' takes what there is")
    target = local_target(cast(AttentionKind, name))
    return PagedAttention(target.dialect, target.card, target.interpret)


def wanted_attention(
    config: ModelConfig, page_size: int, dtype: jnp.dtype, kv_dtype: jnp.dtype
) -> Wanted:
    """What a model with such a cache asks of its attention."""
    group = config.num_heads // config.num_kv_heads
    return Wanted(config.head_dim, group, page_size, jnp.dtype(dtype), jnp.dtype(kv_dtype))


def _without_triton(device: jax.Device, wanted: Wanted | None) -> str:
    mosaic = runs_mosaic(device) and _mosaic_refusal(device, wanted) is None
    return "mosaic" if mosaic else "cpu"


def _mosaic_refusal(device: jax.Device, wanted: Wanted | None) -> str | None:
    if device.platform != "cpu" and not runs_mosaic(device):
        return f"it needs a GPU of compute capability 9.0, this is {device.device_kind}"
    return ANYTHING.refusal() if wanted is None else wanted.refusal()


def cache_dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
    """What keys and values are kept in.

    Args:
        name: "auto", that of the model, or "int8".
        dtype: of the model.

    Raises:
        ConfigError: it is neither.
    """
    if name not in ("auto", "int8"):
        raise ConfigError(f"kv {name!r} is not one of auto, int8")
    return dtype if name == "auto" else jnp.dtype(jnp.int8)


def empty_pages(
    config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype
) -> tuple[LayerPages, ...]:
    """A zeroed cache: L times k and v of [N, B, K, D], of int8 with scales, arrays of their own."""
    shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
    num_scales = 2 if dtype == jnp.int8 else 0

    def layer() -> LayerPages:
        scales = tuple(jnp.zeros(shape[:3], jnp.float32) for _ in range(num_scales))
        return LayerPages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), scales)

    return tuple(layer() for _ in config.layers)


def kv_bytes_per_token(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of cache one token takes over all layers, scales included."""
    token = jax.eval_shape(partial(empty_pages, config, 1, 1, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(token))


def most_pages(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """N of the largest cache that can be addressed, however large the device."""
    places = 2**31 - 1
    if dtype == jnp.int8:
        places = MAX_INT8_ELEMENTS // (config.num_kv_heads * config.head_dim)
    return places // page_size
