"""The least that a step has to move and to compute: what the compiled one is held against."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoints.model_config import ModelConfig
from jaxserve.batch import StepShape
from jaxserve.cards import ITEMSIZE
from jaxserve.roofline import ModelShape


@dataclass(frozen=True, slots=True)
class Case:
    """A step to count, at a shape that has room for exactly this.

    Attributes:
        name: for people.
        rows: sequences, all alike.
        new_tokens: that the step computes of each.
        context: tokens that each has in the cache afterwards.
    """

    name: str
    rows: int
    new_tokens: int
    context: int

    def shape(self, page_size: int) -> StepShape:
        pages = -(-self.context // page_size)
        return StepShape(self.rows * self.new_tokens, self.rows, pages, page_size)

    @property
    def is_decode(self) -> bool:
        return self.new_tokens == 1


@dataclass(frozen=True, slots=True)
class Floor:
    """The least for one case. bytes: read and written. flops: of products and attention."""

    bytes: int
    flops: int


def step_floor(model: ModelConfig, shape: ModelShape, case: Case) -> Floor:
    """Weights once, live keys and values once, activations once.

    Activations: every matrix product and the attention read their input once and write their
    result once, norms, rotation, gate and residual fused into them; logits are float32, written
    once and read once.
    """
    tokens = case.rows * case.new_tokens
    span = shape.span(case.context - case.new_tokens, case.context).scaled(case.rows)
    itemsize = ITEMSIZE[shape.weight_dtype]
    looked_up = tokens * model.width * itemsize
    written = tokens * shape.kv_bytes_per_token
    activations = model.num_layers * tokens * _layer_values(model) * itemsize
    activations += case.rows * (model.width * itemsize + 2 * model.vocab_size * 4)
    moved = shape.read_bytes + looked_up + span.kv_bytes + written + activations
    flops = 2 * shape.layer_params * tokens + 2 * shape.table_params * case.rows
    return Floor(int(moved), int(flops + span.attention_flops))


def _layer_values(model: ModelConfig) -> int:
    """Values that one token's way through one layer reads and writes."""
    queries = model.num_heads * model.head_dim
    projected = queries + 2 * model.num_kv_heads * model.head_dim
    qkv = model.width + projected
    attention = projected + queries
    output = queries + model.width
    gate_up = model.width + model.mlp_width
    down = model.mlp_width + model.width
    return qkv + attention + output + gate_up + down
