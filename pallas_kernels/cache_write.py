"""What changes a paged cache: a step's keys and values written, whole pages copied. In place."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.check import check_pages
from pallas_kernels.native.attention import write_kv_native
from pallas_kernels.reference import write_kv_reference
from pallas_kernels.rope import Rope, apply_rope
from pallas_kernels.target import Target, has_triton


def write_kv(
    pages: tuple[jax.Array, ...],
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    target: Target,
    rope: Rope | None = None,
) -> tuple[jax.Array, ...]:
    """The cache with this step's keys and values in it; in the same buffers where they are donated.

    Args:
        pages: k and v [N, B, K, D]; of int8, then also their scales f32[N, B, K].
        k: [T, K, D], float. v: the same.
        slots: i32[T], place of each token in the cache read as [N * B]; N * B drops the token.
            No other place may be named twice.
        target: which version of the kernel.
        rope: the keys are turned by this first. None: they are.

    Raises:
        ValueError: the operands do not fit together; the message has both sides.
    """
    check_pages((*pages, None, None)[:4])
    shape = (slots.shape[0], *pages[0].shape[2:])
    if k.shape != shape or v.shape != shape:
        raise ValueError(
            f"k {list(k.shape)} and v {list(v.shape)} must be {list(shape)}, for slots "
            f"{list(slots.shape)} and pages {list(pages[0].shape)}"
        )
    if target.dialect == "native" and len(pages) == 2:
        return write_kv_native((pages[0], pages[1]), k, v, slots, rope=rope)
    k = k if rope is None else apply_rope(k, rope)
    if not _in_triton(target):
        return write_kv_reference(pages, k, v, slots)
    from pallas_kernels.triton.write_kv import write_kv_triton

    return write_kv_triton(pages, k, v, slots, interpret=target.interpret)


def copy_pages(
    pages: jax.Array, source: jax.Array, target_pages: jax.Array, *, target: Target
) -> jax.Array:
    """The pages with copies made in order; in the same buffer where it is donated.

    A page may be evicted to be the target of a later copy than the one that reads it.

    Args:
        pages: [N, ...].
        source: i32[C], pages to read.
        target_pages: i32[C], pages to write, none twice; N or more copies nothing.
        target: which version of the kernel.
    """
    if source.shape != target_pages.shape:
        raise ValueError(
            f"source {list(source.shape)} and target_pages {list(target_pages.shape)} must be alike"
        )
    if _in_triton(target):
        from pallas_kernels.triton.copy_pages import copy_pages_triton

        return copy_pages_triton(pages, source, target_pages, interpret=target.interpret)
    read = jnp.take(pages, source, axis=0, mode="clip")
    return pages.at[target_pages].set(read, mode="drop")


def _in_triton(target: Target) -> bool:
    """Beside Mosaic's attention as well, while there is Triton: these kernels only move bytes, and
    XLA's own scatter takes two where one does it."""
    return target.dialect == "triton" or (target.dialect == "mosaic" and has_triton())
