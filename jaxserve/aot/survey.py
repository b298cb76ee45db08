"""All that compiling says about serving a model on a card: will it fit, and what a step does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from checkpoints.model_config import ModelConfig
from jaxserve.aot.compiling import CompiledStep, compile_for
from jaxserve.aot.floor import Case, step_floor
from jaxserve.aot.lower import StepSizes, abstract_params, abstract_state, num_bytes
from jaxserve.aot.result import ServerSizes, StepReport, Survey, worst
from jaxserve.aot.target import Target, make_mesh
from jaxserve.batch import StepShape
from jaxserve.cards import Card, Dtype
from jaxserve.memory import RUNTIME_BYTES, fitting_pages
from jaxserve.models.attention import cache_dtype, kv_bytes_per_token, most_pages
from jaxserve.packing import step_shapes
from jaxserve.roofline import ModelShape, model_shape
from jaxserve.rule_writer import rule_bytes
from jaxserve.step import StepFn

TEMP_RESERVE = 500_000_000
"""Bytes set aside for a step's temporaries before it is known how many it needs."""

DECODES = (Case("decode", 64, 1, 1_000), Case("decode", 8, 1, 8_000))
"""What decoding is counted at: many sequences, and long ones."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Surveyor:
    """Compiles the shapes of one model on one card.

    Attributes:
        name, model: what is served. step: made for it. attention: the kind the step uses.
        target, card: what it is served on. sizes: how. mfu: share of the card's FLOP/s reached.
        progress: told after each compilation.
    """

    name: str
    model: ModelConfig
    step: StepFn
    attention: str
    target: Target
    card: Card
    sizes: ServerSizes
    mfu: float = 0.5
    progress: Progress = lambda message: None

    def survey(self) -> Survey:
        """Compile the server's largest shapes for as many pages as fit, and the cases to count."""
        mesh = make_mesh(self.target)
        pages = self.pages(TEMP_RESERVE)
        serving = self._compile(mesh, self.serving_shapes(pages), pages)
        needed = max(step.temp_bytes for step in serving.values())
        if needed > TEMP_RESERVE:
            pages = self.pages(needed)
            serving = self._compile(mesh, self.serving_shapes(pages), pages)
        cases = {case: case.shape(self.sizes.page_size) for case in self.cases()}
        counted = self._compile(mesh, list(cases.values()), pages)
        steps = [
            self._report(name, step)
            for name, step in zip(("budget", "decode"), serving.values(), strict=False)
        ]
        steps += [self._count(case, counted[shape]) for case, shape in cases.items()]
        return self._summary(pages, steps, [*serving.values(), *counted.values()])

    def max_context(self, pages: int) -> int:
        """Tokens of a sequence that a server with so many pages allows."""
        return min(self.sizes.max_context, max(1, pages - 1) * self.sizes.page_size)

    def ladder(self, pages: int) -> tuple[StepShape, ...]:
        """Every shape that a server with so many pages compiles."""
        return step_shapes(
            max_rows=self.sizes.max_rows,
            token_budget=self.sizes.token_budget,
            max_context=self.max_context(pages),
            page_size=self.sizes.page_size,
        )

    def serving_shapes(self, pages: int) -> list[StepShape]:
        """The server's largest step, and its largest decode if that is another."""
        ladder = self.ladder(pages)
        decode = next((s for s in ladder if s.num_tokens >= self.sizes.max_rows), ladder[-1])
        return list(dict.fromkeys((ladder[-1], decode)))

    def cases(self) -> list[Case]:
        """The decodes within the model's context, and one prompt that fills the budget."""
        budget = min(self.sizes.token_budget, self.model.max_context)
        decodes = [case for case in DECODES if case.context <= self.model.max_context]
        return [*decodes, Case("prefill", 1, budget, budget)]

    def pages(self, reserve: int) -> int:
        """Of a cache that leaves `reserve` bytes for temporaries; 0 if nothing fits."""
        page_size = self.sizes.page_size
        page_bytes = kv_bytes_per_token(self.model, self._kv_dtype()) * page_size
        taken = num_bytes(abstract_params(self.model, self._dtype())) + RUNTIME_BYTES + reserve
        taken += rule_bytes(self.sizes.max_rows, self.model.vocab_size)
        usable = self.sizes.memory_fraction * self.card.memory_bytes
        most = self.sizes.max_rows * -(-self.sizes.max_context // page_size)
        most = min(most, most_pages(self.model, page_size, self._kv_dtype()) - 1)
        return fitting_pages(usable, taken, page_bytes, most)

    def _dtype(self) -> jnp.dtype:
        return jnp.dtype(self.sizes.dtype)

    def _kv_dtype(self) -> jnp.dtype:
        return cache_dtype(self.sizes.kv, self._dtype())

    def step_sizes(self, pages: int) -> StepSizes:
        """Of a server with so many pages."""
        # A model that does not fit is compiled too: for the smallest cache, to say what it needs.
        num_pages = max(pages, 2)
        dtypes = self._dtype(), self._kv_dtype()
        return StepSizes(self.model, num_pages, self.sizes.max_rows, *dtypes)

    def _compile(
        self, mesh: jax.sharding.Mesh, shapes: Sequence[StepShape], pages: int
    ) -> dict[StepShape, CompiledStep]:
        """Several at a time, if their kernels allow it: XLA works outside the GIL."""
        mosaic = self.attention == "mosaic"

        def compile_one(shape: StepShape) -> CompiledStep:
            compiled = compile_for(
                self.step, self.step_sizes(pages), shape, self.target, mesh, mosaic=mosaic
            )
            self.progress(
                f"compiled a step of {shape.num_tokens} tokens in {shape.num_rows} rows of up to "
                f"{shape.max_pages} pages in {compiled.seconds:.0f} s"
            )
            return compiled

        with ThreadPoolExecutor(1 if mosaic else os.cpu_count()) as pool:
            return dict(zip(shapes, pool.map(compile_one, shapes), strict=True))

    def _report(self, name: str, step: CompiledStep, **counted: Any) -> StepReport:
        return StepReport(
            name=name,
            tokens=step.shape.num_tokens,
            rows=step.shape.num_rows,
            max_pages=step.shape.max_pages,
            compile_seconds=step.seconds,
            alias_bytes=step.alias_bytes,
            temp_bytes=step.temp_bytes,
            kernels_per_layer=step.kernels_per_layer,
            launches=step.work.kernels,
            host_waits=step.work.host_waits,
            copies=step.copies,
            **counted,
        )

    def _count(self, case: Case, step: CompiledStep) -> StepReport:
        shape = self._model_shape()
        floor, work = step_floor(self.model, shape, case), step.work
        countable = not work.open_loops and not work.unpriced
        peak, bandwidth = self.card.flops(shape.weight_dtype), self.card.bandwidth
        return self._report(
            f"{case.name} {case.rows} x {case.context:,}",
            step,
            bytes=work.bytes if countable else None,
            flops=work.flops if countable else None,
            least_bytes=floor.bytes,
            least_flops=floor.flops,
            bytes_ratio=work.bytes / floor.bytes if countable else None,
            floor_ms=1e3 * max(floor.bytes / bandwidth, floor.flops / peak),
            predicted_ms=1e3 * max(work.bytes / bandwidth, work.flops / peak / self.mfu)
            if countable
            else None,
        )

    def _model_shape(self) -> ModelShape:
        kv_dtype = cast(Dtype, self._kv_dtype().name)
        return model_shape(self.name, self.model, weight_dtype=self.sizes.dtype, kv_dtype=kv_dtype)

    def _summary(self, pages: int, steps: list[StepReport], compiled: list[CompiledStep]) -> Survey:
        decodes = [step for step in steps if step.name.startswith("decode ")]
        ratios = [step.bytes_ratio for step in decodes]
        state = abstract_state(self.step_sizes(pages), self.sizes.page_size)
        return Survey(
            model=self.name,
            gpu=self.target.name,
            jax_version=jax.__version__,
            attention=self.attention,
            sizes=self.sizes,
            memory_bytes=self.card.memory_bytes,
            fits=pages > 0,
            pages=pages,
            weight_bytes=num_bytes(abstract_params(self.model, self._dtype())),
            cache_bytes=num_bytes(state),
            alias_bytes=min(step.alias_bytes for step in steps),
            temp_bytes=max(step.temp_bytes for step in steps),
            decode_bytes_ratio=max(cast(list[float], ratios)) if ratios and all(ratios) else None,
            predicted_ms=decodes[0].predicted_ms if decodes else None,
            kernels=worst(kernel for step in compiled for kernel in step.kernels),
            steps=tuple(steps),
        )
