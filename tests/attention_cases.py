"""Operands for paged attention, and what has to come out, by another road: numpy in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native.build import has_amx
from pallas_kernels.reference import quantised

Rows = list[tuple[int, int]]
"""(tokens in the step, tokens in the cache after it) of each row."""

# One padded shape for all packings, so that each setting compiles once.
TOKENS, NUM_ROWS, MAX_KEYS = 96, 10, 1088

PACKINGS: dict[str, Rows] = {
    "decodes": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 513), (1, 64), (1, 1023), (1, 512)],
    "one long decode": [(1, 1023)],
    "whole prompts": [(1, 1), (15, 15), (16, 16), (17, 17), (33, 33)],
    "chunks": [(5, 90), (40, 513), (2, 200), (31, 1023)],
    "mixed": [(1, 33), (17, 17), (1, 1), (3, 258), (1, 513), (40, 77), (1, 16)],
    "empty rows between": [(0, 0), (1, 7), (0, 0), (9, 20), (0, 0)],
    "nothing at all": [],
}


@dataclass(frozen=True)
class Setting:
    """What a compiled kernel depends on besides the padded shape."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    dtype: str = "float32"
    int8: bool = False

    @property
    def scale(self) -> float:
        return 1.5 * self.head_dim**-0.5

    def __str__(self) -> str:
        heads = f"{self.num_heads}:{self.num_kv_heads} heads of {self.head_dim}"
        extra = {
            f"pages of {self.page_size}": self.page_size != 16,
            f"window {self.window}": self.window is not None,
            f"soft cap {self.soft_cap}": self.soft_cap is not None,
            self.dtype: self.dtype != "float32",
            "int8": self.int8,
        }
        return ", ".join((heads, *(text for text, told in extra.items() if told)))


# Every group, head dim, page size, and feature at least once; pairs of features where they meet.
SETTINGS = [
    Setting(4, 4, 64),
    Setting(6, 2, 64, window=24),
    Setting(8, 2, 128, page_size=32, int8=True),
    Setting(8, 1, 80, soft_cap=4.0),
    Setting(4, 2, 96, page_size=32, window=33, soft_cap=2.0, int8=True),
    Setting(4, 1, 256, window=500, dtype="bfloat16"),
]


@dataclass(frozen=True)
class Case:
    """Operands of one step, as numpy; NaN wherever nobody owns anything.

    Attributes:
        q: f32[T, H, D]. k, v: f32[N, B, K, D], before they were quantised.
        table, row_start, kv_len: as in `paged_attention`.
        rows: what they were made for.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    table: np.ndarray
    row_start: np.ndarray
    kv_len: np.ndarray
    rows: Rows

    @property
    def num_used(self) -> int:
        return sum(tokens for tokens, _ in self.rows)

    def keys_of(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [kv_len, K, D] of a row, gathered from its pages."""
        pages = self.table[row, : -(-self.kv_len[row] // self.k.shape[1])]
        k, v = (x[pages].reshape(-1, *x.shape[2:]) for x in (self.k, self.v))
        return k[: self.kv_len[row]], v[: self.kv_len[row]]


def make_case(
    rows: Rows,
    setting: Setting,
    *,
    seed: int = 0,
    pages_seed: int = 0,
    tokens: int = TOKENS,
    num_rows: int = NUM_ROWS,
) -> Case:
    """Random operands. A row's numbers depend on its length and `seed` alone, not on its place in
    the batch; which pages they lie in depends on `pages_seed`."""
    max_pages = MAX_KEYS // setting.page_size
    padded = rows + [(0, 0)] * (num_rows - len(rows))
    need = [-(-kv // setting.page_size) for _, kv in padded]
    num_pages = num_rows * max_pages // 4
    order = np.random.default_rng(pages_seed).permutation(np.arange(1, num_pages))
    shape = (num_pages, setting.page_size, setting.num_kv_heads, setting.head_dim)
    k, v = np.full((2, *shape), np.nan, np.float32)
    q = np.full((tokens, setting.num_heads, setting.head_dim), np.nan, np.float32)
    # Entries past a row's last page may hold anything.
    table = np.full((num_rows, max_pages), num_pages + 7, np.int32)
    row_start = np.cumsum([0] + [tokens for tokens, _ in padded]).astype(np.int32)
    for row, (tokens, kv) in enumerate(padded):
        pages, order = order[: need[row]], order[need[row] :]
        table[row, : need[row]] = pages
        rng = np.random.default_rng([seed, kv])
        queries = rng.standard_normal((MAX_KEYS, *q.shape[1:]), dtype=np.float32)
        q[row_start[row] : row_start[row + 1]] = queries[kv - tokens : kv]
        for array in (k, v):
            flat = array[pages].reshape(-1, *shape[2:])
            flat[:kv] = rng.standard_normal((MAX_KEYS, *shape[2:]), dtype=np.float32)[:kv]
            array[pages] = flat.reshape(-1, *shape[1:])
    kv_len = np.array([kv for _, kv in padded], np.int32)
    return Case(q, k, v, table, row_start, kv_len, rows)


def operands(case: Case, setting: Setting) -> dict[str, jax.Array]:
    """The case as `paged_attention` takes it, by name."""
    dtype = jnp.dtype(setting.dtype)
    arrays = {
        "q": jnp.asarray(case.q, dtype),
        "page_table": jnp.asarray(case.table),
        "row_start": jnp.asarray(case.row_start),
        "kv_len": jnp.asarray(case.kv_len),
    }
    for name, x in (("k", case.k), ("v", case.v)):
        if setting.int8:
            # NaN has no int8: its scale is one, and stands for everything unowned.
            arrays[f"{name}_pages"], arrays[f"{name}_scale"] = quantised(jnp.asarray(x))
        else:
            arrays[f"{name}_pages"] = jnp.asarray(x, dtype)
    return arrays


def oracle(case: Case, setting: Setting) -> np.ndarray:
    """f64[num_used, H, D]: every token of every row, one head at a time."""
    arrays = operands(case, setting)
    given = {name: np.asarray(arrays[name], np.float64) for name in ("q", "k_pages", "v_pages")}
    if setting.int8:
        for name in ("k", "v"):
            scale = np.asarray(arrays[f"{name}_scale"], np.float64)[..., None]
            with np.errstate(invalid="ignore"):  # the NaN of what nobody owns
                given[f"{name}_pages"] *= scale
    exact = replace(case, q=given["q"], k=given["k_pages"], v=given["v_pages"])
    out = np.zeros((case.num_used, *case.q.shape[1:]))
    group = setting.num_heads // setting.num_kv_heads
    for row, (tokens, kv) in enumerate(case.rows):
        keys, values = exact.keys_of(row)
        position = np.arange(kv - tokens, kv)
        seen = np.arange(kv)[None] <= position[:, None]
        if setting.window is not None:
            seen &= np.arange(kv)[None] > position[:, None] - setting.window
        span = slice(case.row_start[row], case.row_start[row + 1])
        for head in range(setting.num_heads):
            scores = exact.q[span, head] @ keys[:, head // group].T * setting.scale
            if setting.soft_cap is not None:
                scores = setting.soft_cap * np.tanh(scores / setting.soft_cap)
            weights = np.where(seen, np.exp(scores - scores.max(axis=1, initial=0)[:, None]), 0)
            total = weights.sum(axis=1, keepdims=True)
            out[span, head] = weights @ values[:, head // group] / total
    return out


def tolerance(setting: Setting, dialect: str) -> float:
    """Of values near 1. The CPU's matrix units take float32 as two bfloat16, which is 16 bits."""
    if setting.dtype == "bfloat16":
        return 4e-2
    return 5e-5 if dialect == "native" and has_amx() else 2e-5
