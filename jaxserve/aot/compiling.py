"""One step through XLA's GPU compiler, and everything that can be read off the result."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxserve.aot.hlo import parse_hlo
from jaxserve.aot.kernels import Kernel, read_kernels
from jaxserve.aot.lower import StepSizes, trace_step
from jaxserve.aot.mosaic_dump import mosaic_dump, mosaic_kernels
from jaxserve.aot.schedule import copies, kernels_per_layer
from jaxserve.aot.target import Target
from jaxserve.aot.traffic import Price, Work, step_work
from jaxserve.batch import StepShape
from jaxserve.step import StepFn

OPTIONS: dict[str, bool | str] = {
    # Without the card XLA cannot try which tiles suit a product, and what it then takes for
    # products in Triton (16 by 8, split along the sum) reads the weights several times over.
    # cuBLAS chooses for itself when the step is loaded.
    "xla_gpu_enable_triton_gemm": False,
    # It plans with 80% of the card: a cache that fills more would send it looking for what to
    # compute twice to save memory.
    "xla_disable_hlo_passes": "rematerialization",
}
"""Of the compiler."""


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """Facts of one compilation.

    Attributes:
        shape: compiled for.
        seconds: the compiler took, on this machine.
        argument_bytes: weights, state and batch.
        alias_bytes: of the donated state that is really updated in place.
        temp_bytes: needed beside the arguments while the step runs.
        work: counted from the scheduled program.
        kernels_per_layer: launches, the median over the layers.
        copies: of a weight or of pages; there should be none.
        kernels: every distinct one, as assembled.
    """

    shape: StepShape
    seconds: float
    argument_bytes: int
    alias_bytes: int
    temp_bytes: int
    work: Work
    kernels_per_layer: int
    copies: tuple[str, ...]
    kernels: tuple[Kernel, ...]

    @property
    def custom_kernels(self) -> tuple[Kernel, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.custom)


def compile_for(
    step: StepFn,
    sizes: StepSizes,
    shape: StepShape,
    target: Target,
    mesh: jax.sharding.Mesh,
    *,
    mosaic: bool = False,
) -> CompiledStep:
    """Trace, compile and take apart one step. Needs neither a GPU nor memory for the weights.

    Args:
        mosaic: the step has kernels in that dialect: only one at a time may be compiled.
    """
    traced = trace_step(step, sizes, shape, mesh)
    prices = kernel_prices(traced.jaxpr)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = folder / "mosaic"
        told.mkdir()
        with mosaic_dump(told) if mosaic else nullcontext():
            lowered = traced.lower()
            started = time.perf_counter()
            # Without the second option newer releases of XLA dump everything but the PTX.
            dump = {"xla_dump_to": name, "xla_dump_emitter_re": "ptx"}
            compiled = lowered.compile(OPTIONS | dump)
            seconds = time.perf_counter() - started
        module = parse_hlo(compiled.as_text())
        kernels = mosaic_kernels(module, told) if mosaic else []
        kernels += read_kernels(folder, target, prices)
    memory: Any = compiled.memory_analysis()
    return CompiledStep(
        shape=shape,
        seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        work=step_work(module, {name: price for name, price in prices.items() if price}),
        kernels_per_layer=kernels_per_layer(module),
        copies=tuple(copies(module)),
        kernels=tuple(kernels),
    )


def kernel_prices(jaxpr: Any) -> dict[str, Price | None]:
    """Names of a program's Pallas kernels -> the cost they declare, summed over all calls; None
    for those of which a call has no `cost_estimate`."""
    prices: dict[str, Price | None] = {}
    for params in _pallas_calls(jaxpr):
        name = params["name"] or params["jaxpr"].debug_info.func_name
        declared = params["cost_estimate"]
        so_far = prices.get(name, Price(0, 0, 0))
        prices[name] = (
            Price(
                so_far.calls + 1,
                so_far.bytes + declared.bytes_accessed,
                so_far.flops + declared.flops,
            )
            if so_far and declared
            else None
        )
    return prices


def _pallas_calls(jaxpr: Any) -> Iterator[dict[str, Any]]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if "cost_estimate" in equation.params:  # `pallas_call`, and what Mosaic's kernels are
            yield equation.params
            continue
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(part, "jaxpr", part), "eqns"):
                    yield from _pallas_calls(part)
