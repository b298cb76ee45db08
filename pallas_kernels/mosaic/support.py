"""What the Mosaic kernels can do, told without loading the dialect: any jax can ask."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

MIN_JAX = (0, 11)
"""The dialect's interface moved before this release."""
OFFERED = jax.__version_info__ >= MIN_JAX
GRAIN = 16
"""Head dims and page sizes are multiples of this: what a swizzle spans, and what a copy brings."""
MAX_GROUP = 32
"""Query heads per KV head: a tile of 64 rows has two queries at least."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a model and its cache ask of attention.

    Attributes:
        head_dim: D. group: query heads per KV head. page_size: B.
        dtype: of queries. pages_dtype: of the cache.
    """

    head_dim: int
    group: int
    page_size: int
    dtype: jnp.dtype
    pages_dtype: jnp.dtype

    def refusal(self) -> str | None:
        """Why the Mosaic kernels cannot do it, with what they can; None if they can."""
        if not OFFERED:
            return f"it needs jax {'.'.join(map(str, MIN_JAX))} or later, this is {jax.__version__}"
        if self.pages_dtype != self.dtype or self.dtype not in (jnp.bfloat16, jnp.float16):
            return (
                f"queries are {jnp.dtype(self.dtype)} and the cache is "
                f"{jnp.dtype(self.pages_dtype)}: it does bfloat16 and float16, both alike"
            )
        if self.head_dim % (GRAIN if self.head_dim <= 128 else 64) or self.head_dim > 256:
            return f"head_dim {self.head_dim}: it does multiples of {GRAIN} up to 128, 192 and 256"
        if self.page_size % GRAIN:
            return f"pages of {self.page_size} tokens: it does multiples of {GRAIN}"
        if self.group > MAX_GROUP:
            return f"{self.group} query heads per KV head: it does up to {MAX_GROUP}"
        return None


def check_mosaic(q_heads: int, dtype: jnp.dtype, pages: jax.Array) -> None:
    """Check what is asked of the kernels.

    Args:
        q_heads: H. dtype: of queries. pages: a layer's keys [N, B, K, D].

    Raises:
        ValueError: they cannot do it; the message says what they can.
    """
    page_size, num_kv_heads, head_dim = pages.shape[1:]
    wanted = Wanted(head_dim, q_heads // num_kv_heads, page_size, dtype, pages.dtype)
    if refusal := wanted.refusal():
        raise ValueError(f"attention in Mosaic: {refusal}")
