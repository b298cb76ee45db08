"""What `jaxserve compile` does: a survey of the default step, and executables to take along."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast, get_args

import jax
import jax.numpy as jnp

from checkpoints.model_config import ModelConfig
from jaxserve.aot.compiling import OPTIONS
from jaxserve.aot.lower import abstract_state, trace_step
from jaxserve.aot.result import ServerSizes, Survey
from jaxserve.aot.saved import make_manifest, save_steps
from jaxserve.aot.survey import Progress, Surveyor
from jaxserve.aot.target import Target, find_target, make_mesh
from jaxserve.batch import StepShape
from jaxserve.cards import Card
from jaxserve.errors import ConfigError
from jaxserve.models.attention import (
    AttentionKind,
    PagedAttention,
    cache_dtype,
    wanted_attention,
)
from jaxserve.models.decoder import Decoder
from jaxserve.step import make_step


def make_surveyor(
    name: str,
    model: ModelConfig,
    card: Card,
    sizes: ServerSizes,
    *,
    attention: str,
    mfu: float = 0.5,
    progress: Progress = lambda message: None,
) -> Surveyor:
    """For the default step.

    Raises:
        ConfigError: there is no description of the card, no such attention, it cannot do the model
            there, or the context is beyond the model's.
    """
    if sizes.max_context > model.max_context:
        raise ConfigError(
            f"a context of {sizes.max_context} tokens is beyond the {model.max_context} "
            "the model was made for"
        )
    target = find_target(card.name)
    kinds = get_args(AttentionKind)
    kind = "triton" if attention == "auto" else attention
    if kind not in kinds:
        raise ConfigError(f"attention {kind!r} is not one of {', '.join(('auto', *kinds))}")
    if kind == "mosaic":
        check_mosaic(model, target, sizes)
    attend = PagedAttention(cast(AttentionKind, kind), target.architecture)
    return Surveyor(
        name,
        model,
        make_step(Decoder(model, attend)),
        kind,
        target,
        card,
        sizes,
        mfu=mfu,
        progress=progress,
    )


def check_mosaic(model: ModelConfig, target: Target, sizes: ServerSizes) -> None:
    """See that attention in Mosaic can do a model on a card.

    Raises:
        ConfigError: it cannot, with what it can and what would do.
    """
    dtype = jnp.dtype(sizes.dtype)
    wanted = wanted_attention(model, sizes.page_size, dtype, cache_dtype(sizes.kv, dtype))
    refusal = wanted.refusal()
    if target.architecture != "sm_90":
        refusal = (
            f"it needs a GPU of compute capability 9.0, {target.name} is {target.architecture}"
        )
    if refusal:
        raise ConfigError(f"attention 'mosaic': {refusal}; 'triton' is for any card")


def save_executables(surveyor: Surveyor, survey: Survey, folder: Path) -> None:
    """Compile every shape of the server surveyed and write it to a folder.

    Compiled anew: what was surveyed was compiled to be looked into, and would write its dumps
    wherever it is loaded.

    Raises:
        ConfigError: the model does not fit the card, or the folder cannot be written.
    """
    if not survey.fits:
        raise ConfigError(f"{survey.model} does not fit {survey.gpu}: there is nothing to save")
    mesh = make_mesh(surveyor.target)

    def compile_one(shape: StepShape) -> jax.stages.Compiled:
        traced = trace_step(surveyor.step, surveyor.step_sizes(survey.pages), shape, mesh)
        compiled: jax.stages.Compiled = traced.lower().compile(OPTIONS)
        surveyor.progress(f"compiled a step of {shape.num_tokens} tokens, to be saved")
        return compiled

    shapes = surveyor.ladder(survey.pages)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        steps = dict(zip(shapes, pool.map(compile_one, shapes), strict=True))
    state = abstract_state(surveyor.step_sizes(survey.pages), surveyor.sizes.page_size)
    manifest = make_manifest(
        surveyor.model,
        surveyor.attention,
        state,
        shapes,
        dtype=surveyor.sizes.dtype,
        device_kind=mesh.devices.item().device_kind,
    )
    try:
        written = save_steps(folder, manifest, steps)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
    surveyor.progress(f"{len(steps)} executables, {written / 1e6:,.1f} MB, are in {folder}")
