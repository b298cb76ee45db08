"""The kernels for Hopper through Pallas' Mosaic compiler and NVIDIA's assembler, without a card.

XLA's plugin assembles them while it compiles the program around them, and writes what the
assembler said where an environment variable tells it. Where the dialect is not offered they are
refused.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxserve.aot.kernels import Kernel
from jaxserve.aot.mosaic_dump import parse_dump
from jaxserve.aot.target import find_target, make_mesh
from jaxserve.plan import PLAN_MODELS
from pallas_kernels.mosaic.support import OFFERED
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.target import Target

NAMES = {"prefill_attention", "decode_attention", "merge_decodes"}
DOTS = {"prefill_attention", "decode_attention"}


class Heads(NamedTuple):
    """H, K and D; and what a layer sets."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    soft_cap: float | None = None


def heads_of(model: str) -> Heads:
    config = PLAN_MODELS[model]
    return Heads(config.num_heads, config.num_kv_heads, config.head_dim)


HEADS = {
    "llama-3.1-8b": heads_of("llama-3.1-8b"),
    "qwen3-8b": heads_of("qwen3-8b"),
    "smollm2-135m": heads_of("smollm2-135m"),
    "heads of 80, window": Heads(32, 32, 80, window=2048),
    "heads of 96, soft cap": Heads(32, 8, 96, soft_cap=30.0),
    "heads of 256, both": Heads(8, 4, 256, window=4096, soft_cap=50.0),
}
CASES = [(name, card) for card in ("h100-80gb", "h200-141gb") for name in HEADS]


def compile_kernels(card: str, tokens: int, heads: Heads, dump: Path) -> dict[str, Kernel]:
    """What the assembler says of each kernel; shared memory as the launch asks for it."""
    mesh = make_mesh(find_target(card))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rows, max_pages, dtype = 64, 512, jnp.bfloat16
    shapes = {
        "q": ((tokens, heads.num_heads, heads.head_dim), dtype),
        "k_pages": ((28_000, 16, heads.num_kv_heads, heads.head_dim), dtype),
        "v_pages": ((28_000, 16, heads.num_kv_heads, heads.head_dim), dtype),
        "page_table": ((rows, max_pages), jnp.int32),
        "row_start": ((rows + 1,), jnp.int32),
        "kv_len": ((rows,), jnp.int32),
    }
    arguments = {
        name: jax.ShapeDtypeStruct(*shape, sharding=sharding) for name, shape in shapes.items()
    }
    settings = {"scale": heads.head_dim**-0.5, "window": heads.window, "soft_cap": heads.soft_cap}
    attend = partial(paged_attention, target=Target("mosaic", "sm_90"), **settings)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(lambda given: attend(**given)).trace(arguments)
    traced.lower().compile()
    for file in dump.glob("*.ptxas"):  # wgmma made to wait for each other
        assert "Potential Performance Loss" not in file.read_text()
    return parse_dump(dump)


@pytest.mark.parametrize(("name", "card"), CASES)
def test_the_kernels_fit_a_hopper_and_its_registers(name, card, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    # A process assembles the same kernel once: each case has a size of its own.
    tokens = 256 + 16 * CASES.index((name, card))
    work = partial(compile_kernels, card, tokens, HEADS[name], tmp_path)
    if not OFFERED:
        with pytest.raises(ValueError, match=r"needs jax 0\.11 or later"):
            work()
        return
    kernels = work()
    assert kernels.keys() == NAMES
    for kernel in kernels.values():
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), kernel
        assert kernel.registers <= 255
        assert kernel.shared_bytes <= find_target(card).shared_bytes, kernel
    assert {name for name, kernel in kernels.items() if kernel.tensor_core} == DOTS
