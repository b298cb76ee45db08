"""A step's arguments as shapes, and the step lowered for them. No weight is ever allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints.families import HF_NAMES, leaves_of
from checkpoints.model_config import ModelConfig
from jaxserve.batch import DeviceState, StepShape
from jaxserve.executor import empty_state
from jaxserve.models.llama import Params
from jaxserve.packing import pack
from jaxserve.step import StepFn


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step's arguments depend on besides its `StepShape`.

    Attributes:
        model: the dimensions.
        num_pages: N, the null page included.
        max_rows: slots of the device state.
        dtype: of the weights. kv_dtype: of the cache.
    """

    model: ModelConfig
    num_pages: int
    max_rows: int
    dtype: jnp.dtype
    kv_dtype: jnp.dtype


def abstract_params(config: ModelConfig, dtype: jnp.dtype) -> Params:
    """The parameter tree that a checkpoint of this model loads into, as shapes."""
    # A tree's shapes do not depend on the file format: any table of names spells out its leaves.
    layers: list[dict[str, jax.ShapeDtypeStruct]] = [{} for _ in config.layers]
    params: Params = {"layers": layers}
    for leaf in leaves_of(config, HF_NAMES[config.family]):
        spec = jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if leaf.is_norm else dtype)
        match leaf.path:
            case ("layers", int(index), str(key)):
                layers[index][key] = spec
            case (str(key),):
                params[key] = spec
    return params


def abstract_state(sizes: StepSizes, page_size: int) -> DeviceState:
    """The device state of a server of these sizes, as shapes."""

    def make() -> DeviceState:
        return empty_state(
            sizes.model,
            num_pages=sizes.num_pages,
            page_size=page_size,
            max_rows=sizes.max_rows,
            dtype=sizes.kv_dtype,
        )

    state: DeviceState = jax.eval_shape(make)
    return state


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def trace_step(step: StepFn, sizes: StepSizes, shape: StepShape, mesh: Mesh) -> jax.stages.Traced:
    """Trace a step for the mesh's device, the state donated as in serving."""
    arguments = (
        abstract_params(sizes.model, sizes.dtype),
        abstract_state(sizes, shape.page_size),
        *pack((), shape),
    )
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    # Kernels in Pallas ask for the device by name while they are traced.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(step, donate_argnums=1).trace(*placed)
