"""The engine with a model of random weights, in this process: crowds of requests sent at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax

from bench.gpu.model import ENGINE_SHAPES, PAGE_SIZE, RandomModel, random_model
from bench.gpu.stage import Given
from bench.gpu.timing import prepare
from bench.measure import WARM_UP_TOKENS, Point, figures, random_prompts
from bench.offline import StepTimes, run_round
from jaxserve.engine import Engine
from jaxserve.executor import JaxExecutor, compile_steps
from jaxserve.grammar import Grammars
from jaxserve.pages import PagePool
from jaxserve.scheduler import Scheduler
from jaxserve.startup import LoadedEngine


def run(given: Given) -> Iterator[Point]:
    """A point a crowd."""
    prepare(given)
    model = random_model()
    loaded = load(model)
    for crowd in model.sizes.crowds:
        prompts = random_prompts(crowd, model.sizes.prompt, loaded.vocab_size, seed=crowd)
        run_round(loaded, next(prompts), min(WARM_UP_TOKENS, model.sizes.output), StepTimes())
        times = StepTimes()
        done = run_round(loaded, next(prompts), model.sizes.output, times)
        measured = figures([done])
        del measured["output_tokens_per_s_range"]  # of one round
        yield {
            "model": model.name,
            "concurrency": crowd,
            "prompt_tokens": model.sizes.prompt,
            "output_tokens": model.sizes.output,
            **measured,
            **times.figures(),
        }


def load(model: RandomModel) -> LoadedEngine:
    """An engine as `load_engine` makes it, without a promise, and of few shapes."""
    shapes = list(itertools.islice(model.shapes.values(), ENGINE_SHAPES))
    steps = compile_steps(model.step, model.params, model.state, shapes)
    scheduler = Scheduler(
        PagePool(model.num_pages, PAGE_SIZE),
        max_rows=model.sizes.max_rows,
        token_budget=model.sizes.token_budget,
        max_context=model.sizes.max_context,
    )
    engine = Engine(scheduler, JaxExecutor(model.params, model.state, steps))
    kind = jax.devices()[0].device_kind
    vocab_size = model.config.vocab_size
    return LoadedEngine(
        engine,
        vocab_size,
        f"{kind}, {model.name}",
        longest_step=0.0,
        grammars=Grammars(None, vocab_size=vocab_size, eos_ids=()),
    )
