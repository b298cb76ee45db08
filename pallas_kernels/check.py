"""What kernels refuse: operands that do not fit together, told with both sides."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MAX_INT8_ELEMENTS = 2**31
"""Triton counts elements in 32 bits for arrays up to 2^32 bytes: an int8 one would wrap around."""


def check_pages(pages: tuple[jax.Array | None, ...]) -> None:
    """Check k, v [N, B, K, D] and their scales f32[N, B, K], None unless k and v are int8."""
    k, v, *scales = pages
    assert k is not None and v is not None
    if k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(
            f"k_pages {_told(k)} and v_pages {_told(v)} must be alike, of shape [N, B, K, D]"
        )
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if k.dtype != jnp.int8:
            if scale is not None:
                raise ValueError(f"{name} is for int8 pages; these are {_told(k)}")
        elif scale is None or scale.shape != k.shape[:3] or scale.dtype != jnp.float32:
            told = "None" if scale is None else _told(scale)
            raise ValueError(f"{name} {told} must be float32{list(k.shape[:3])}, for {_told(k)}")
    if k.dtype.itemsize == 1 and k.size > MAX_INT8_ELEMENTS:
        raise ValueError(
            f"pages {_told(k)} have {k.size} elements, more than the {MAX_INT8_ELEMENTS} that "
            f"32-bit offsets reach: use at most {MAX_INT8_ELEMENTS * k.shape[0] // k.size} pages"
        )


def check_queries(
    q: jax.Array,
    k_pages: jax.Array,
    page_table: jax.Array,
    row_start: jax.Array,
    kv_len: jax.Array,
) -> None:
    """Check q [T, H, D] and what tells its rows, against pages that are in order."""
    num_kv_heads, head_dim = k_pages.shape[2:]
    if q.ndim != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q {_told(q)} must be [T, H, {head_dim}] with H a multiple of {num_kv_heads}, "
            f"for k_pages {_told(k_pages)}"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating) or k_pages.dtype not in (q.dtype, jnp.int8):
        raise ValueError(
            f"q {_told(q)} must be of a float dtype that k_pages {_told(k_pages)} share, "
            "unless those are int8"
        )
    rows = kv_len.shape[0] if kv_len.ndim == 1 else -1
    if rows < 0 or row_start.shape != (rows + 1,) or page_table.shape[:-1] != (rows,):
        raise ValueError(
            f"page_table {_told(page_table)}, row_start {_told(row_start)} and kv_len "
            f"{_told(kv_len)} must be [R, P], [R + 1] and [R]"
        )
    for name, x in (("page_table", page_table), ("row_start", row_start), ("kv_len", kv_len)):
        if x.dtype != jnp.int32:
            raise ValueError(f"{name} {_told(x)} must be int32, not {x.dtype}")


def check_settings(window: int | None, soft_cap: float | None) -> None:
    """Check what a layer sets."""
    if window is not None and window < 1:
        raise ValueError(f"window {window} must be at least 1: a query sees itself")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap {soft_cap} must be above 0")


def _told(x: jax.Array) -> str:
    return f"{x.dtype}{list(x.shape)}"
