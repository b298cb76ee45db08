"""Which version of the kernels runs: a dialect, and the card its tiles are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax

Dialect = Literal["reference", "cpu", "native", "triton", "mosaic"]

DIALECTS: tuple[Dialect, ...] = ("reference", "cpu", "native", "triton", "mosaic")


@dataclass(frozen=True, slots=True)
class Target:
    """What kernels are made for. Hashable: part of what is compiled.

    Attributes:
        dialect: "reference" is the specification; "cpu" is plain jnp, for any backend; "native"
            is C++ for CPUs; "triton" is Pallas for NVIDIA GPUs of compute capability 8.0 and later;
            "mosaic" is Pallas for those of 9.0, Hopper.
        card: one of `tuned.CARDS`, for the tiles of "triton".
        interpret: run "triton" or "mosaic" on a CPU, operation by operation: for tests.
    """

    dialect: Dialect = "cpu"
    card: str = "sm_80"
    interpret: bool = False

    def __post_init__(self) -> None:
        if self.dialect not in DIALECTS:
            raise ValueError(f"dialect {self.dialect!r} is not one of {', '.join(DIALECTS)}")


def local_target(dialect: Dialect) -> Target:
    """The dialect on jax's default device: Pallas is interpreted where there is no GPU."""
    device = jax.devices()[0]
    card = "sm_90" if _capability(device) >= 9 else "sm_80"
    interpret = dialect in ("triton", "mosaic") and device.platform == "cpu"
    return Target(dialect, card, interpret=interpret)


def has_triton() -> bool:
    """Whether this jax has the dialect at all: it is deprecated, and will go one day."""
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        return False
    return hasattr(triton, "CompilerParams")


def runs_triton(device: jax.Device) -> bool:
    """Whether the dialect's kernels run on the device."""
    return device.platform == "gpu" and _capability(device) >= 8 and has_triton()


def runs_mosaic(device: jax.Device) -> bool:
    """Whether the device is of the generation that the dialect's kernels are made for."""
    return device.platform == "gpu" and 9 <= _capability(device) < 10


def _capability(device: jax.Device) -> float:
    """CUDA compute capability; 0 for everything else."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except ValueError:  # what an AMD GPU has there is a name
        return 0.0
