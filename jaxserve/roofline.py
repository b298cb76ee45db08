"""How long a step takes at best: bytes over bandwidth, operations over speed. Plain arithmetic.

A decode step streams the weights once, however many sequences share it, and every sequence's keys
and values besides. A prefill token costs two operations a weight. The matrix products and the
attention run one after the other, so a step is the slower of memory and arithmetic for the one,
plus the same for the other. Units everywhere: bytes, bytes/s, FLOP/s, seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpoints.model_config import ModelConfig
from jaxserve.cards import ITEMSIZE, Card, Dtype

SCALE_BYTES = 4
"""Of what an int8 key or value of one head was divided by."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step, or a part of one, has to do.

    Attributes:
        tokens: that go through the layers.
        drawn: tokens that come out: rows that need logits.
        kv_bytes: of keys and values read.
        attention_flops: of q.k and of probabilities times v.
    """

    tokens: float
    drawn: float
    kv_bytes: float
    attention_flops: float

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.tokens + other.tokens,
            self.drawn + other.drawn,
            self.kv_bytes + other.kv_bytes,
            self.attention_flops + other.attention_flops,
        )

    def scaled(self, factor: float) -> StepWork:
        """The same work `factor` times over."""
        return StepWork(
            self.tokens * factor,
            self.drawn * factor,
            self.kv_bytes * factor,
            self.attention_flops * factor,
        )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as the roofline sees it.

    Attributes:
        name: for people.
        layer_params: parameters of all layers and the final norm. Every token uses each once.
        table_params: V * E, of the embedding, and of the output head as well.
        tied_head: the two are one matrix.
        windows: for each layer, tokens a query sees; None sees everything.
        num_heads: H.
        num_kv_heads: K. H is plain multi-head attention, 1 is multi-query.
        head_dim: D.
        max_context: tokens the model was made for.
        weight_dtype: of the weights; int8 means that the products are int8 too.
        kv_dtype: of the cache.
    """

    name: str
    layer_params: int
    table_params: int
    tied_head: bool
    windows: tuple[int | None, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    weight_dtype: Dtype = "bfloat16"
    kv_dtype: Dtype = "bfloat16"

    @property
    def num_params(self) -> int:
        return self.layer_params + self.table_params * (1 if self.tied_head else 2)

    @property
    def weight_bytes(self) -> int:
        """Of memory. 16 GB for 8e9 parameters in bfloat16."""
        return self.num_params * ITEMSIZE[self.weight_dtype]

    @property
    def read_bytes(self) -> int:
        """Of weights read in a step: not an embedding of its own, of which only rows are."""
        return (self.layer_params + self.table_params) * ITEMSIZE[self.weight_dtype]

    @property
    def kv_bytes_per_layer(self) -> int:
        """Of cache one token takes in one layer: K keys and K values of D numbers, and a scale
        for each where they are int8."""
        vector = self.head_dim * ITEMSIZE[self.kv_dtype]
        vector += SCALE_BYTES if self.kv_dtype == "int8" else 0
        return 2 * self.num_kv_heads * vector

    @property
    def kv_bytes_per_token(self) -> int:
        """Of cache one token takes. Windowed layers too: their pages are not given back."""
        return len(self.windows) * self.kv_bytes_per_layer

    def span(self, start: float, stop: float) -> StepWork:
        """The work of tokens [start, stop) of a sequence. A decode of context n is [n - 1, n)."""
        touched = pairs = 0.0
        for window in self.windows:
            limit = stop if window is None else window
            touched += min(stop, stop - start + limit - 1)
            pairs += _visible(stop, limit) - _visible(start, limit)
        return StepWork(
            tokens=stop - start,
            drawn=1,
            kv_bytes=touched * self.kv_bytes_per_layer,
            attention_flops=4 * self.num_heads * self.head_dim * pairs,
        )


def _visible(num_tokens: float, window: float) -> float:
    """Pairs of a query and a key it sees, for queries [0, num_tokens): 1 + 2 + ... up to window."""
    ramp = min(num_tokens, window)
    return ramp * (ramp + 1) / 2 + (num_tokens - ramp) * window


def model_shape(
    name: str,
    config: ModelConfig,
    *,
    weight_dtype: Dtype = "bfloat16",
    kv_dtype: Dtype = "bfloat16",
) -> ModelShape:
    """Count the parameters of a model from its dimensions."""
    width, heads, kv_heads = config.width, config.num_heads, config.num_kv_heads
    projections = (heads + 2 * kv_heads) * config.head_dim  # columns of q, k and v
    layer = width * projections + heads * config.head_dim * width + 3 * width * config.mlp_width
    layer += (4 if config.sandwich_norm else 2) * width
    layer += projections if config.qkv_bias else 0
    layer += 2 * config.head_dim if config.qk_norm else 0
    return ModelShape(
        name=name,
        layer_params=config.num_layers * layer + width,
        table_params=config.vocab_size * width,
        tied_head=config.tied_head,
        windows=tuple(layer_config.window for layer_config in config.layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.head_dim,
        max_context=config.max_context,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
    )


@dataclass(frozen=True, slots=True)
class Roofline:
    """Predicts steps of a model on a card.

    Attributes:
        shape: the model.
        card: the device, with its peak rates or measured ones.
        mfu: share of the card's FLOP/s that matrix products and attention reach.
        overhead: seconds every step takes besides.
        weights_only: the textbook's picture instead: every step reads all weights, every token
            costs two operations a parameter, and nothing else takes time.
    """

    shape: ModelShape
    card: Card
    mfu: float = 0.5
    overhead: float = 0.0
    weights_only: bool = False

    def step_seconds(
        self, decode_rows: float, prefill_tokens: float = 0, kv_tokens: float = 0
    ) -> float:
        """Duration of a step.

        Args:
            decode_rows: sequences that get a token, taken to be of one length.
            prefill_tokens: of one prompt, from its start.
            kv_tokens: that the decoding rows have in the cache, all together. 0 leaves their KV
                reads out.
        """
        work = StepWork(decode_rows, decode_rows, 0, 0)
        if kv_tokens:
            work = self.decode_work(decode_rows, kv_tokens / decode_rows)
        if prefill_tokens:
            work += self.shape.span(0, prefill_tokens)
        return self.work_seconds(work)

    def work_seconds(self, work: StepWork) -> float:
        """Duration of a step that has this to do."""
        if self.weights_only:
            read, flops = self.shape.weight_bytes, 2 * self.shape.num_params * work.tokens
            return max(read / self.card.bandwidth, flops / self._speed) + self.overhead
        products = 2 * self.shape.layer_params * work.tokens
        products += 2 * self.shape.table_params * work.drawn
        return (
            max(self.shape.read_bytes / self.card.bandwidth, products / self._speed)
            + self.attention_seconds(work)
            + self.overhead
        )

    def attention_seconds(self, work: StepWork) -> float:
        """The part of it spent on keys and values, also where `weights_only` leaves it out."""
        dtype: Dtype = "float32" if self.shape.kv_dtype == "float32" else "bfloat16"
        flops = work.attention_flops / (self.mfu * self.card.flops(dtype))
        return max(work.kv_bytes / self.card.bandwidth, flops)

    def decode_work(self, rows: float, context: float) -> StepWork:
        """A token for each of `rows` sequences of `context` tokens."""
        return self.shape.span(context - 1, context).scaled(rows)

    def prefill_seconds(self, tokens: int) -> float:
        """A whole prompt by itself, in one step."""
        return self.step_seconds(0, tokens)

    @property
    def compute_bound_rows(self) -> int:
        """Decoding rows from which arithmetic takes longer than reading the weights."""
        shape = self.shape
        if self.weights_only:
            read, params = shape.weight_bytes, shape.num_params
        else:
            read, params = shape.read_bytes, shape.layer_params + shape.table_params
        return int(read / self.card.bandwidth * self._speed / (2 * params)) + 1

    @property
    def _speed(self) -> float:
        return self.mfu * self.card.flops(self.shape.weight_dtype)
