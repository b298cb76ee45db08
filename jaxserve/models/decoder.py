"""The decoder around a family's layers: embed, L layers, final norm; and the output head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from checkpoints.model_config import LayerConfig, ModelConfig
from jaxserve.batch import BatchDescriptor, LayerPages, PageTable
from jaxserve.models import gemma3, llama
from jaxserve.models.attention import Attend, PagedAttention
from jaxserve.models.layers import linear, rms_norm, rope_tables, take_rows
from jaxserve.models.llama import Params, Weights

BLOCKS = {
    "llama": llama.block,
    "mistral": llama.block,
    "qwen2": llama.block,
    "qwen3": llama.block,
    "gemma3": gemma3.block,
}
"""The layer of every family."""

BlockFn = Callable[[Weights, jax.Array, LayerPages], tuple[jax.Array, LayerPages]]


class Model(Protocol):
    """What a step needs of a model. Pure functions of their arguments."""

    def forward(
        self,
        params: Params,
        layers: tuple[LayerPages, ...],
        token_ids: jax.Array,
        batch: BatchDescriptor,
        page_table: PageTable,
    ) -> tuple[jax.Array, tuple[LayerPages, ...]]:
        """Final hidden states [T, E] of i32[T] tokens, and the cache with them in it."""
        ...

    def unembed(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Logits f32[..., V] of hidden states [..., E]."""
        ...


@dataclass(frozen=True, slots=True)
class Decoder:
    """A `Model` of one of the known families.

    The layers are unrolled, each with weights and pages of its own: scanning over stacked ones
    would copy every layer's weights out of the stack in every step.
    """

    config: ModelConfig
    attention: PagedAttention

    def forward(
        self,
        params: Params,
        layers: tuple[LayerPages, ...],
        token_ids: jax.Array,
        batch: BatchDescriptor,
        page_table: PageTable,
    ) -> tuple[jax.Array, tuple[LayerPages, ...]]:
        outputs = tuple(self.run_layers(params, layers, token_ids, batch, page_table))
        return self.final_norm(params, outputs[-1][0]), tuple(pages for _, pages in outputs)

    def run_layers(
        self,
        params: Params,
        layers: tuple[LayerPages, ...],
        token_ids: jax.Array,
        batch: BatchDescriptor,
        page_table: PageTable,
    ) -> Iterator[tuple[jax.Array, LayerPages]]:
        """`forward` without the final norm, layer by layer: for steps that look in between.

        Yields:
            After each layer the residual stream [T, E] and the layer's pages with this step's
            keys and values in them. A step has to return the pages of all layers.
        """
        # Padding of zeros stays zeros through every layer, and a CPU's kernels skip it.
        x = jnp.where(batch.is_padding[:, None], 0, embed(self.config, params, token_ids))
        attend = self.attention.prepare(
            batch, page_table, layers[0], num_heads=self.config.num_heads, dtype=x.dtype
        )
        blocks = {
            layer: self._block(layer, batch.positions, attend)
            for layer in dict.fromkeys(self.config.layers)
        }
        for layer, weights, pages in zip(self.config.layers, params["layers"], layers, strict=True):
            x, written = blocks[layer](weights, x, pages)
            yield x, written

    def final_norm(self, params: Params, x: jax.Array) -> jax.Array:
        """Of a residual stream [T, E], whichever layer's: what `unembed` takes."""
        return rms_norm(x, params["norm"], self.config.norm_eps)

    def _block(self, layer: LayerConfig, positions: jax.Array, attend: Attend) -> BlockFn:
        """One kind of layer. Jitted so that it is traced once, not L times; XLA inlines it."""
        block = BLOCKS[self.config.family]
        rope = rope_tables(layer.rope, self.config.head_dim, positions)

        def run(weights: Weights, x: jax.Array, pages: LayerPages) -> tuple[jax.Array, LayerPages]:
            return block(self.config, layer, weights, x, rope, pages, attend)

        return jax.jit(run)

    def unembed(self, params: Params, hidden: jax.Array) -> jax.Array:
        head = params["embed"] if self.config.tied_head else params["head"]
        logits = linear(hidden, head, dtype=jnp.float32)
        cap = self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def embed(config: ModelConfig, params: Params, token_ids: jax.Array) -> jax.Array:
    """[T, E]: rows of the embedding, scaled where the family does that."""
    x = take_rows(params["embed"], token_ids)
    return x if config.embed_scale == 1 else x * jnp.asarray(config.embed_scale, x.dtype)
