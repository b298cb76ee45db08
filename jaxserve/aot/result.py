"""What a survey says, as data and as JSON. Knows nothing of how it was found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from jaxserve.aot.kernels import Kernel
from jaxserve.cards import Dtype


@dataclass(frozen=True, slots=True)
class ServerSizes:
    """What a server would be told, by the names of `EngineConfig`."""

    max_rows: int
    token_budget: int
    max_context: int
    page_size: int = 16
    memory_fraction: float = 0.9
    dtype: Dtype = "bfloat16"
    kv: str = "auto"


@dataclass(frozen=True, slots=True)
class StepReport:
    """One compiled shape.

    Attributes:
        name: "decode" and "budget" are the server's largest decode and its largest step, at full
            context; a case that was counted says its rows and tokens.
        tokens, rows, max_pages: of the shape.
        compile_seconds: on this machine.
        alias_bytes, temp_bytes, kernels_per_layer, copies: as in `CompiledStep`.
        launches: kernels of the whole step. host_waits: see `traffic.Work`.
        bytes, flops: counted; None where the step loops until its data say stop, or has kernels
            that do not say what they do, and at the server's own shapes, whose contents vary.
        least_bytes, least_flops: see `floor`.
        bytes_ratio: bytes over least_bytes.
        floor_ms, predicted_ms: the slower of memory at its published rate and arithmetic: of the
            least at the full rate, and of what was counted at the share `mfu` of it.
    """

    name: str
    tokens: int
    rows: int
    max_pages: int
    compile_seconds: float
    alias_bytes: int
    temp_bytes: int
    kernels_per_layer: int
    launches: int
    host_waits: int
    copies: tuple[str, ...]
    bytes: int | None = None
    flops: int | None = None
    least_bytes: int | None = None
    least_flops: int | None = None
    bytes_ratio: float | None = None
    floor_ms: float | None = None
    predicted_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """A model, compiled for a card.

    Attributes:
        fits: weights, temporaries and some pages, within the share of memory.
        pages: of the cache, the null page included; 0 if it does not fit.
        weight_bytes: of memory. cache_bytes: of the donated state: the pages, and beside them
            one token a row. alias_bytes: of it updated in place by every shape.
        temp_bytes: of the shape that needs most.
        kernels: every distinct one, the worst of its name over all shapes.
        decode_bytes_ratio: the worst of the decodes counted; None if one cannot be counted.
        predicted_ms: of the first decode counted.
    """

    model: str
    gpu: str
    jax_version: str
    attention: str
    sizes: ServerSizes
    memory_bytes: float
    fits: bool
    pages: int
    weight_bytes: int
    cache_bytes: int
    alias_bytes: int
    temp_bytes: int
    decode_bytes_ratio: float | None
    predicted_ms: float | None
    kernels: tuple[Kernel, ...]
    steps: tuple[StepReport, ...]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def worst(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """One kernel a name: that with most spilled, then most registers and shared memory."""
    found: dict[str, Kernel] = {}
    for kernel in kernels:
        found[kernel.name] = max(found.get(kernel.name, kernel), kernel, key=_badness)
    return tuple(found[name] for name in sorted(found))


def _badness(kernel: Kernel) -> tuple[int, int, int, int]:
    return kernel.spill_bytes, kernel.stack_bytes, kernel.registers, kernel.shared_bytes
