"""Compiled steps in files: made on any machine, loaded by one that has the card.

A folder holds `manifest.json` and one file a shape. The files are pickles, as JAX makes them:
load only what you trust.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import jax
import msgspec
from jax.experimental import serialize_executable

from checkpoints.model_config import ModelConfig
from jaxserve.batch import DeviceState, PromptScores, StepOutput, StepShape
from jaxserve.errors import ConfigError
from jaxserve.models.llama import Params
from jaxserve.packing import pack

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What executables were made for and by. All of it has to be true where they are loaded.

    Attributes:
        jaxserve, jax, jaxlib: versions.
        device_kind: as the driver calls the card.
        platform_version: of the runtime, where one was there to ask; None fits any.
        model: fingerprint of its config.
        attention: the kind. dtype: of the weights. kv_dtype: of the cache.
        num_pages, page_size, max_rows: of the device state.
        token_budget, max_pages: of the largest shape.
    """

    jaxserve: str
    jax: str
    jaxlib: str
    device_kind: str
    platform_version: str | None
    model: str
    attention: str
    dtype: str
    kv_dtype: str
    num_pages: int
    page_size: int
    max_rows: int
    token_budget: int
    max_pages: int


def make_manifest(
    model: ModelConfig,
    attention: str,
    state: DeviceState,
    shapes: Sequence[StepShape],
    *,
    dtype: str,
    device_kind: str,
    platform_version: str | None = None,
) -> Manifest:
    """Of this installation, for steps of these shapes over this state, arrays or shapes."""
    pages = state.layers[0].k
    return Manifest(
        **{name: metadata.version(name) for name in ("jaxserve", "jax", "jaxlib")},
        device_kind=device_kind,
        platform_version=platform_version,
        model=fingerprint(model),
        attention=attention,
        dtype=dtype,
        kv_dtype=pages.dtype.name,
        num_pages=pages.shape[0],
        page_size=pages.shape[1],
        max_rows=state.last_token.shape[0],
        token_budget=max(shapes).num_tokens,
        max_pages=max(shapes).max_pages,
    )


def fingerprint(model: ModelConfig) -> str:
    """Of everything that a config says."""
    return hashlib.sha256(msgspec.json.encode(model)).hexdigest()


def differences(saved: Manifest, here: Manifest) -> list[str]:
    """Why executables saved under one manifest cannot run under another."""
    found = []
    for field in dataclasses.fields(Manifest):
        theirs, ours = getattr(saved, field.name), getattr(here, field.name)
        if theirs != ours and not (field.name == "platform_version" and None in (theirs, ours)):
            found.append(f"{field.name.replace('_', ' ')} {theirs} there, {ours} here")
    return found


def save_steps(
    folder: Path, manifest: Manifest, steps: Mapping[StepShape, jax.stages.Compiled]
) -> int:
    """Write executables of the default step and what they are for.

    Returns:
        Bytes written. The manifest comes last: a folder without one is not complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    written = 0
    for shape, compiled in steps.items():
        payload, _, _ = serialize_executable.serialize(compiled)
        written += (folder / _file_name(shape)).write_bytes(payload)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    return written


def read_manifest(folder: Path) -> Manifest:
    """What a folder's executables are for.

    Raises:
        ConfigError: it has no manifest, or one that cannot be read.
    """
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        raise ConfigError(
            f"{folder} holds no executables: {error.strerror}: {MANIFEST}; "
            "make some with `jaxserve compile --save`"
        ) from error
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{folder / MANIFEST} is not a manifest of this version: {error}"
        ) from error


def load_steps(
    folder: Path,
    here: Manifest,
    shapes: Sequence[StepShape],
    params: Params,
    state: DeviceState,
) -> dict[StepShape, jax.stages.Compiled]:
    """Load executables onto the default device, compiling nothing.

    Args:
        folder: from `save_steps`.
        here: what is true of this process.
        shapes: wanted.
        params, state: what they will be called with; arrays or shapes.

    Raises:
        ConfigError: they were made for something else, or one is missing.
    """
    if reasons := differences(read_manifest(folder), here):
        raise ConfigError(
            f"the executables in {folder} do not fit: {'; '.join(reasons)}. Compile them again "
            "with `jaxserve compile --save`, or start without --executables"
        )
    backend = jax.devices()[0].client
    steps = {}
    for shape in shapes:
        try:
            payload = (folder / _file_name(shape)).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{folder} has no executable for a step of {shape.num_tokens} tokens in "
                f"{shape.num_rows} rows of {shape.max_pages} pages: {error.strerror}"
            ) from error
        batch, page_table = pack((), shape)
        arguments = (params, state, batch, page_table)
        # Only the structure counts.
        leaf = batch.kv_len
        scores = PromptScores(leaf, leaf, leaf)
        results = (StepOutput(leaf, leaf, leaf, leaf, scores, pooled=leaf), state)
        steps[shape] = serialize_executable.deserialize_and_load(
            payload,
            jax.tree.structure((arguments, {})),
            jax.tree.structure(results),
            backend=backend,
            execution_devices=jax.devices()[:1],
        )
    return steps


def _file_name(shape: StepShape) -> str:
    return (
        f"step-{shape.num_tokens}-tokens-{shape.num_rows}-rows-{shape.max_pages}-pages-of-"
        f"{shape.page_size}.executable"
    )
