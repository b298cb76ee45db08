"""Models written as `flax.nnx` modules, for the same steps and executors as the built-in families.

    model, params = from_nnx(module)
    steps = compile_steps(make_step(model), params, state, shapes)
    executor = JaxExecutor(params, state, steps)

The module is taken apart once and put together again while a step is traced. What the compiled
step is called with are plain dicts of arrays: an `nnx.State` would cost several times as much in
every call. The module itself is not touched, and may be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx

from jaxserve.batch import BatchDescriptor, LayerPages, PageTable
from jaxserve.errors import ConfigError
from jaxserve.models.llama import Params


@runtime_checkable
class ServableModule(Protocol):
    """What an `nnx.Module` has to offer: `Model` without the parameters, which it has itself.

    Everything in it that is not an `nnx.Variable` is static. `models.layers` has the usual pieces;
    attention over the cache is `PagedAttention().prepare(batch, page_table, layers[0],
    num_heads=..., dtype=x.dtype)` once, then a call for each layer, which returns its new pages.
    """

    def forward(
        self,
        layers: tuple[LayerPages, ...],
        token_ids: jax.Array,
        batch: BatchDescriptor,
        page_table: PageTable,
    ) -> tuple[jax.Array, tuple[LayerPages, ...]]:
        """Final hidden states [T, E] of i32[T] tokens, and the cache with them in it."""
        ...

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits f32[R, V] of hidden states [R, E]."""
        ...


@dataclass(frozen=True, slots=True)
class NnxModel:
    """A `Model` made of a module's structure; its arrays come with every call."""

    structure: nnx.GraphDef[Any]

    def forward(
        self,
        params: Params,
        layers: tuple[LayerPages, ...],
        token_ids: jax.Array,
        batch: BatchDescriptor,
        page_table: PageTable,
    ) -> tuple[jax.Array, tuple[LayerPages, ...]]:
        module: ServableModule = nnx.merge(self.structure, params)
        result = module.forward(layers, token_ids, batch, page_table)
        _refuse_changes(params, module)
        return result

    def unembed(self, params: Params, hidden: jax.Array) -> jax.Array:
        module: ServableModule = nnx.merge(self.structure, params)
        logits = module.unembed(hidden)
        _refuse_changes(params, module)
        return logits


def from_nnx(module: nnx.Module) -> tuple[NnxModel, Params]:
    """Take a module apart into a model and its parameters.

    Args:
        module: offers what `ServableModule` says. Its arrays are shared, not copied. Made under
            `nnx.eval_shape` it has none yet: then params are shapes, good for compiling.

    Returns:
        The model and a tree of plain dicts, named as in the module; entries of an `nnx.List` are
        numbered. A Variable that appears in two places (tied weights) is there once.

    Raises:
        ConfigError: the module lacks one of the two methods.
    """
    if not isinstance(module, ServableModule):
        missing = [name for name in ("forward", "unembed") if not hasattr(module, name)]
        raise ConfigError(
            f"{type(module).__name__} has no {' and no '.join(missing)} method: "
            "give it the methods of jaxserve.models.nnx.ServableModule"
        )
    structure, state = nnx.split(module)
    return NnxModel(structure), nnx.to_pure_dict(state)


def _refuse_changes(params: Params, module: ServableModule) -> None:
    """A step keeps nothing but pages: a Variable that is written to would silently stay as it was.

    Raises ConfigError naming those that no longer hold the array they were given.
    """
    before = jax.tree.leaves_with_path(params)
    after = jax.tree.leaves(nnx.to_pure_dict(nnx.state(module)))
    changed = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for (path, given), found in zip(before, after, strict=True)
        if found is not given
    ]
    if changed:
        raise ConfigError(
            f"the module writes to {', '.join(changed)} in a step: state other than the pages is "
            "not kept between steps; return it, or leave it out"
        )
