"""Devices by name, with the rates their makers publish. Dense rates, not sparse."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxserve.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16", "int8"]
ITEMSIZE: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

MIB = 1 << 20
GB = 1e9
TERA = 1e12


@dataclass(frozen=True, slots=True)
class Card:
    """A device.

    Attributes:
        name: what users call it.
        description: what it is.
        memory_bytes: in all, as the driver reports it.
        bandwidth: of its memory, bytes/s.
        bf16_flops: peak FLOP/s of bfloat16 and float16 products summed in float32.
        fp32_flops: of float32 products; on a GPU that is TF32, which XLA uses for them.
        int8_ops: of int8 products, operations/s.
    """

    name: str
    description: str
    memory_bytes: float
    bandwidth: float
    bf16_flops: float
    fp32_flops: float
    int8_ops: float

    def flops(self, dtype: Dtype) -> float:
        """Peak rate of products of this type."""
        if dtype == "float32":
            return self.fp32_flops
        return self.int8_ops if dtype == "int8" else self.bf16_flops


def _gpu(
    name: str, description: str, memory_mib: int, bandwidth_gb: float, bf16: float, int8: float
) -> Card:
    """Rates in GB/s and T(FL)OP/s. TF32 runs at half the bfloat16 rate on all of these."""
    return Card(
        name=name,
        description=description,
        memory_bytes=memory_mib * MIB,
        bandwidth=bandwidth_gb * GB,
        bf16_flops=bf16 * TERA,
        fp32_flops=bf16 / 2 * TERA,
        int8_ops=int8 * TERA,
    )


# Rates: NVIDIA's data sheets (Ada: the architecture white paper). Memory: as nvidia-smi shows it.
_GPUS = (
    _gpu("a100-80gb", "NVIDIA A100 80 GB, SXM", 81_920, 2_039, 312, 624),
    _gpu("a100-40gb", "NVIDIA A100 40 GB, SXM", 40_960, 1_555, 312, 624),
    _gpu("h100-80gb", "NVIDIA H100 80 GB, SXM", 81_559, 3_350, 989.4, 1_979),
    _gpu("h200-141gb", "NVIDIA H200 141 GB, SXM", 143_771, 4_800, 989.4, 1_979),
    _gpu("l40s", "NVIDIA L40S 48 GB", 46_068, 864, 362, 733),
    _gpu("rtx-4090", "NVIDIA GeForce RTX 4090 24 GB", 24_564, 1_008, 165.2, 660.6),
)

CARDS: Mapping[str, Card] = {card.name: card for card in _GPUS}


def find_card(
    name: str,
    *,
    memory: float | None = None,
    bandwidth: float | None = None,
    flops: float | None = None,
) -> Card:
    """A known card, or "cpu"; measured rates take the place of published ones.

    Args:
        name: a key of `CARDS`, or "cpu", which has no rates but the ones given.
        memory: bytes.
        bandwidth: bytes/s.
        flops: FLOP/s, for whatever type the products have.

    Raises:
        ConfigError: a name that is not known, or a cpu without its rates.
    """
    if name == "cpu":
        if memory is None or bandwidth is None or flops is None:
            raise ConfigError(
                "cpu has no published rates: measure this machine and give --memory (GB), "
                "--bandwidth (GB/s) and --flops (TFLOP/s)"
            )
        return Card("cpu", "a CPU, as measured", memory, bandwidth, flops, flops, flops)
    if name not in CARDS:
        raise ConfigError(f"no card {name!r}: known are {', '.join(CARDS)} and cpu")
    card = CARDS[name]
    if memory is not None:
        card = dataclasses.replace(card, memory_bytes=memory)
    if bandwidth is not None:
        card = dataclasses.replace(card, bandwidth=bandwidth)
    if flops is not None:
        card = dataclasses.replace(card, bf16_flops=flops, fp32_flops=flops, int8_ops=flops)
    return card
