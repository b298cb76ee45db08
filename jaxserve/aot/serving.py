"""Saved executables in place of compilation, when a server starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax

from checkpoints.model_config import ModelConfig
from jaxserve.aot.saved import load_steps, make_manifest, read_manifest
from jaxserve.batch import DeviceState, StepShape
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.llama import Params


def saved_pages(config: EngineConfig, folder: Path) -> int:
    """N that a folder's executables were compiled for: the server's cache has to be that.

    Raises:
        ConfigError: the settings ask for another cache or another step.
    """
    if config.step is not None:
        raise ConfigError(
            f"the executables in {folder} are of the default step: leave out --step {config.step}, "
            "or --executables"
        )
    num_pages = read_manifest(folder).num_pages
    if config.num_pages not in (None, num_pages):
        raise ConfigError(
            f"the executables in {folder} are for {num_pages} pages: leave out --num-pages "
            f"{config.num_pages}"
        )
    return num_pages


def saved_steps(
    folder: Path,
    model: ModelConfig,
    attention: str,
    shapes: Sequence[StepShape],
    params: Params,
    state: DeviceState,
) -> dict[StepShape, jax.stages.Compiled]:
    """Load the steps of a server on jax's default device.

    Raises:
        ConfigError: they were made for something else; the message says for what.
    """
    device = jax.devices()[0]
    here = make_manifest(
        model,
        attention,
        state,
        shapes,
        dtype=params["embed"].dtype.name,
        device_kind=device.device_kind,
        platform_version=device.client.platform_version,
    )
    return load_steps(folder, here, shapes, params, state)
