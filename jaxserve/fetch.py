"""A model of the catalogue is fetched when it is first asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from checkpoints import CATALOGUE, CheckpointError, Store


def ensure_pulled(model: str, store: Path) -> None:
    """Fetch a catalogue model on first use, in a process of its own: converting needs jax.

    Raises:
        CheckpointError: it cannot be had; the lines on stderr say why.
    """
    if model not in CATALOGUE or Store(store).holds(model):
        return
    command = [sys.executable, "-m", "jaxserve", "pull", model, "--store", str(store)]
    if subprocess.run(command, check=False).returncode != 0:
        raise CheckpointError(f"could not pull {model}", remedy="The lines above say why.")
