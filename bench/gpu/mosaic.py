"""Whether the kernels for Hopper can take part, and as what. Without a GPU they are interpreted."""

from __future__ import annotations

import os

import jax

from pallas_kernels.mosaic.support import Wanted
from pallas_kernels.target import Target, local_target, runs_mosaic

INTERPRETER_THREADS = "8"


def mosaic_target(wanted: Wanted) -> Target | None:
    """For jax's default device; None where the card, this jax or the kernels cannot do it."""
    device = jax.devices()[0]
    if device.platform != "cpu" and not runs_mosaic(device):
        return None
    return None if wanted.refusal() else local_target("mosaic")


def make_threads() -> None:
    """Before jax is used: interpreted warpgroups that wait for each other block XLA's threads, of
    which a CPU of few cores has too few."""
    if getattr(jax.config, "jax_platforms", None) == "cpu":
        os.environ.setdefault("NPROC", INTERPRETER_THREADS)
