"""A Mosaic kernel as the rest of the package wants one: with a name, and nested operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def launch(
    body: Callable[..., None],
    *,
    name: str,
    out_type: Any,
    scratch: tuple[Any, ...],
    grid: dict[str, int],
    warpgroups: int,
    cost: pl.CostEstimate,
    interpret: bool,
) -> Callable[..., Any]:
    """`plgpu.kernel`; the body finds itself by `lax.axis_index` of the grid's names and of
    "warpgroup"."""
    params: Any = plgpu.InterpretGPUParams() if interpret else None
    told: dict[str, Any] = {"cost_estimate": cost} if jax.__version_info__ >= (0, 12) else {}
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=params,
        **told,
    )
