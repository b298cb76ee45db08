"""A probe: the norm of the residual stream after each layer, for the newest token of each row.

    jaxserve serve --step examples.norm_probe:make_step

The tokens are the default step's. What the probe saw of the latest step is in
`JaxExecutor.last_aux`, so it is read where the engine is: in Python. README.md shows how.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.batch import BatchDescriptor, DeviceState, PageTable, StepOutput
from jaxserve.models.decoder import Decoder
from jaxserve.models.llama import Params
from jaxserve.step import StepFn, draw


def make_step(decoder: Decoder) -> StepFn:
    """The default step, with f32[L, R] norms in `StepOutput.aux`.

    Rows are in the order of the step's spans. Norms of rows that are only padding mean nothing.
    """

    def step(
        params: Params, state: DeviceState, batch: BatchDescriptor, page_table: PageTable
    ) -> tuple[StepOutput, DeviceState]:
        layers, newest = [], []  # each layer's pages, and its output for each row's last token
        token_ids = batch.fed_token_ids(state.last_token)
        for x, pages in decoder.run_layers(params, state.layers, token_ids, batch, page_table):
            layers.append(pages)
            newest.append(x[batch.last_token])
        logits = decoder.unembed(params, decoder.final_norm(params, newest[-1]))
        norms = jnp.stack([norm(x) for x in newest])
        return draw(logits, state, tuple(layers), batch, aux=norms)

    return step


def norm(x: jax.Array) -> jax.Array:
    """f32[R]: Euclidean length of each row of [R, E]."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))
