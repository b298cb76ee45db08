"""What the card is, and what it does at best: copy, and multiply in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from bench.gpu.stage import Given
from bench.gpu.timing import on_gpu, prepare, random, timed
from bench.measure import Point, rounded
from jaxserve.sizing import device_bytes


def run(given: Given) -> Iterator[Point]:
    """The device, then bandwidth and speed."""
    prepare(given)
    device = jax.devices()[0]
    yield {
        "figure": "device",
        "value": device.device_kind,
        "platform": device.platform,
        "compute_capability": str(getattr(device, "compute_capability", "")),
        "usable_gb": rounded(device_bytes(device) / 1e9),
    }
    elements, width = (1 << 29, 8192) if on_gpu() else (1 << 20, 256)
    x = random(0, (elements,))
    moved = 2 * x.nbytes  # read and written
    seconds, x = timed(jax.jit(jnp.negative, donate_argnums=0), x)
    yield {"figure": "copy", "value": rounded(moved / seconds / 1e9), "unit": "GB/s"}

    weights = random(1, (width, width), deviation=width**-0.5)  # products keep their size
    multiply = jax.jit(jnp.matmul)
    seconds, _ = timed(lambda a: multiply(a, weights), random(2, (width, width)))
    speed = rounded(2 * width**3 / seconds / 1e12)
    yield {"figure": "bf16 matmul", "value": speed, "unit": "TFLOP/s"}
