"""Paged attention and the writing of pages by the C++ kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native.build import has_amx, require_native
from pallas_kernels.rope import Rope


def paged_attention_native(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    row_start: jax.Array,
    kv_len: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    rope: Rope | None = None,
) -> jax.Array:
    """`reference.paged_attention_reference` of queries that `rope` has turned; padding becomes 0.

    What is turned is not rounded to the queries' dtype again.
    """
    require_native()
    nothing = jnp.zeros(0, jnp.float32)
    return jax.ffi.ffi_call("jaxserve_paged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))(
        q,
        k_pages,
        v_pages,
        nothing if k_scale is None else k_scale,
        nothing if v_scale is None else v_scale,
        page_table,
        row_start,
        kv_len,
        *(rope or (nothing, nothing)),
        scale=np.float32(scale),
        window=np.int64(window or 0),
        soft_cap=np.float32(soft_cap or 0),
        use_amx=has_amx(),
    )


def write_kv_native(
    pages: tuple[jax.Array, jax.Array],
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    rope: Rope | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`reference.write_kv_reference` into float pages, in place, of keys that `rope` has turned."""
    require_native()
    k_pages, v_pages = pages
    out = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in pages]
    call = jax.ffi.ffi_call("jaxserve_write_kv", out, input_output_aliases={5: 0, 6: 1})
    cos, sin = rope or (jnp.zeros(0, jnp.float32),) * 2
    k, v = k.astype(k_pages.dtype), v.astype(v_pages.dtype)
    written = call(k, v, slots, cos, sin, k_pages, v_pages)
    return written[0], written[1]
