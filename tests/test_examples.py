"""The step functions in examples/, served and by hand, against a model in plain numpy."""

from __future__ import annotations

import functools
import random
from array import array
from pathlib import Path
from typing import Any

import dense_llama
import jax
import numpy as np
import pytest
from engines import NUM_PAGES, PAGE_SIZE, TINY, drain, generate, new_state, request, tiny

from examples.contrastive_step import contrastive_step, divergence
from jaxserve.batch import DeviceState, StepShape
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.executor import JaxExecutor, compile_steps
from jaxserve.packing import pack
from jaxserve.pages import PagePool
from jaxserve.request import Request
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Sequence as Row
from jaxserve.sequence import Span
from jaxserve.startup import resolve_step
from jaxserve.step import StepFn

MODEL = "llama-untied"
SHAPE = StepShape(num_tokens=16, num_rows=8, max_pages=8, page_size=PAGE_SIZE)
EARLY_LAYERS = (1, 2)
ALPHA = 0.1
MARGIN = 1e-3  # a smaller lead over the runner-up may fall either way
README = Path(__file__).parent.parent / "examples" / "README.md"


def step_named(name: str | None) -> StepFn:
    return resolve_step(name, tiny(MODEL).decoder)


@functools.cache
def compiled(step: StepFn) -> Any:
    return compile_steps(step, tiny(MODEL).params, new_state(tiny(MODEL)), [SHAPE])


def engine_of(step: StepFn, params: Any = None, usable_pages: int = NUM_PAGES) -> Engine:
    loaded = tiny(MODEL)
    executor = JaxExecutor(params or loaded.params, new_state(loaded), compiled(step))
    scheduler = Scheduler(
        PagePool(usable_pages, PAGE_SIZE),
        max_rows=SHAPE.num_rows,
        token_budget=SHAPE.num_tokens,
        max_context=SHAPE.max_pages * PAGE_SIZE,
        admission_slack=0,  # admit as eagerly as possible: a small pool must preempt
    )
    return Engine(scheduler, executor)


def some_requests(seed: int, **sampling: Any) -> list[Request]:
    """Prompts of very different lengths: most are computed in chunks, among others' decodes."""
    rng = random.Random(seed)
    lengths = (1, 3, 17, 40, 5, 70)
    return [
        request(str(i), [rng.randrange(320) for _ in range(n)], 20, seed=i, **sampling)
        for i, n in enumerate(lengths)
    ]


default = functools.cache(lambda: step_named(None))
probe = functools.cache(lambda: step_named("examples.norm_probe:make_step"))
dola = functools.cache(
    lambda: contrastive_step(tiny(MODEL).decoder, early_layers=EARLY_LAYERS, alpha=ALPHA)
)


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> float:
    mean = (p + q) / 2
    return float(np.sum(p * np.log(p / mean)) + np.sum(q * np.log(q / mean))) / 2


def dola_scores(streams: np.ndarray) -> tuple[np.ndarray, int, float]:
    """f64[V] scores, the early layer and its lead, of [L, E]: one token after each layer."""
    config, params = tiny(MODEL).decoder.config, tiny(MODEL).params
    log_p, *early = dense_llama.log_probs(
        config, params, streams[[-1, *(layer - 1 for layer in EARLY_LAYERS)]]
    )
    p = np.exp(log_p)
    distances = [jensen_shannon(p, np.exp(log_q)) for log_q in early]
    best = int(np.argmax(distances))
    scores = np.where(p >= ALPHA * p.max(), log_p - early[best], -np.inf)
    return scores, EARLY_LAYERS[best], float(np.ptp(distances))


@pytest.mark.parametrize(
    "usable_pages",
    [
        pytest.param(NUM_PAGES, id="pages for all"),
        pytest.param(9, id="so few pages that sequences are preempted"),
    ],
)
def test_contrasted_tokens_equal_those_of_a_dense_model(usable_pages):
    config, params = tiny(MODEL).decoder.config, tiny(MODEL).params
    requests = some_requests(seed=0)
    engine = engine_of(dola(), usable_pages=usable_pages)
    tokens = generate(engine, requests)
    assert (engine.scheduler.num_preemptions > 0) == (usable_pages < NUM_PAGES)

    compared, unlike_default = 0, 0
    for each in requests:
        text = [*each.prompt_ids, *tokens[each.request_id]]
        streams = dense_llama.residual_stream(config, params, text)
        for i in range(len(each.prompt_ids), len(text)):
            scores, _, lead = dola_scores(streams[:, i - 1])
            second, first = np.sort(scores)[-2:]
            if first - second < MARGIN or lead < MARGIN:
                continue
            assert text[i] == np.argmax(scores)
            compared += 1
            plain = dense_llama.log_probs(config, params, streams[-1, i - 1])
            unlike_default += bool(np.argmax(plain) != text[i])
    assert compared > 60, "too many near ties for the comparison to prove anything"
    assert unlike_default > 20, "the contrast changed too few tokens to be seen"


def test_the_contrasting_step_reports_the_layer_it_chose():
    engine = engine_of(dola())
    each = request("a", [5, 6, 7], 1)
    generate(engine, [each])
    config, params = tiny(MODEL).decoder.config, tiny(MODEL).params
    streams = dense_llama.residual_stream(config, params, each.prompt_ids)
    assert engine.executor.last_aux[0] == dola_scores(streams[:, -1])[1]


def test_each_row_has_the_divergence_of_its_own_layers():
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=5, size=(4, 3, 50)).astype(np.float32)  # final and 3 early, 3 rows
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum(axis=-1, keepdims=True)
    expected = [[jensen_shannon(probs[0, row], early[row]) for row in range(3)] for early in probs]
    got = divergence(jax.numpy.asarray(logits[0]), jax.numpy.asarray(logits[1:]))
    np.testing.assert_allclose(got, expected[1:], rtol=1e-5)


def test_contrasting_with_strength_and_alpha_0_draws_the_default_tokens():
    neutral = contrastive_step(tiny(MODEL).decoder, early_layers=(1,), strength=0, alpha=0)
    requests = [*some_requests(seed=1)[:3], *some_requests(seed=1, temperature=1.0)[3:]]
    assert generate(engine_of(neutral), requests) == generate(engine_of(default()), requests)


def test_a_model_that_computes_nan_is_reported_and_not_contrasted_away():
    params = tiny(MODEL).params
    engine = engine_of(dola(), params | {"norm": params["norm"] * np.float32("nan")})
    engine.add(request("a", [1, 2, 3], 4))
    (event,) = drain(engine)["a"]
    assert event.finish_reason == "error" and "not finite" in event.message


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"early_layers": ()}, "from 1 to 2"),
        ({"early_layers": (0,)}, "from 1 to 2"),
        ({"early_layers": (3,)}, "of a model of 3"),
        ({"early_layers": (1,), "alpha": 1.5}, "between 0 and 1"),
    ],
)
def test_settings_of_the_contrast_that_mean_nothing_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        contrastive_step(tiny(MODEL).decoder, **settings)


def test_the_contrast_can_be_named_on_the_command_line():
    step = step_named("examples.contrastive_step:make_step")
    state = jax.eval_shape(lambda: new_state(tiny(MODEL)))
    output, new = jax.eval_shape(step, tiny(MODEL).params, state, *pack((), SHAPE))
    assert output.aux.shape == (SHAPE.num_rows,)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )


def test_the_probe_leaves_the_tokens_alone():
    requests = [*some_requests(seed=2)[:3], *some_requests(seed=2, temperature=1.0)[3:]]
    assert generate(engine_of(probe()), requests) == generate(engine_of(default()), requests)


def test_the_probe_sees_the_norms_of_a_dense_model_while_serving():
    config, params = tiny(MODEL).decoder.config, tiny(MODEL).params
    engine = engine_of(probe())
    prompt = [random.Random(3).randrange(320) for _ in range(20)]  # in two chunks
    tokens = generate(engine, [request("a", prompt, 6)])["a"]
    streams = dense_llama.residual_stream(config, params, [*prompt, *tokens[:-1]])
    norms = np.asarray(engine.executor.last_aux)
    assert norms.shape == (config.num_layers, SHAPE.num_rows) and norms.dtype == np.float32
    expected = np.linalg.norm(streams[:, -1], axis=-1)
    np.testing.assert_allclose(norms[:, 0], expected, rtol=1e-4)


def test_the_probe_tells_rows_apart():
    config, params = tiny(MODEL).decoder.config, tiny(MODEL).params
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    texts = ([7, 8, 9, 10], [300], [11, 12])
    spans = []
    for slot, text in enumerate(texts):
        row = Row(request(str(slot), text, 1), array("i", text), slot=slot)
        assert pool.grow(row.pages, len(text))
        spans.append(Span(row, 0, len(text), feed=False, draws=True))
    run = compiled(probe())[SHAPE]
    state: DeviceState = new_state(tiny(MODEL), fill=float("nan"))
    output, _ = run(params, state, *jax.device_put(pack(spans, SHAPE)))
    for row, text in enumerate(texts):
        stream = dense_llama.residual_stream(config, params, text)[:, -1]
        expected = np.linalg.norm(stream, axis=-1)
        np.testing.assert_allclose(np.asarray(output.aux)[:, row], expected, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "examples.norm_probe",
        "examples.norm_probe:",
        "examples.norm_probe:make_stap",
        "examples.norm_prob:make_step",
        ":make_step",
        "",
    ],
)
def test_a_step_that_cannot_be_found_is_refused_with_the_remedy(name):
    with pytest.raises(ConfigError, match=r"expected package\.module:factory") as refused:
        step_named(name)
    assert repr(name) in str(refused.value)


def test_the_readmes_snippet_runs(capsys):
    _, _, rest = README.read_text().partition("```python\n")
    snippet, _, _ = rest.partition("```")
    source = snippet.replace('"smollm2-135m-instruct"', repr(str(TINY / MODEL)))
    assert source != snippet
    exec(compile(source, str(README), "exec"), {})
    printed = [int(line) for line in capsys.readouterr().out.split()]
    config, params = tiny(MODEL).decoder.config, tiny(MODEL).params
    text = [1, 2, 3, 4, *printed]
    streams = dense_llama.residual_stream(config, params, text[:-1])
    expected = dense_llama.log_probs(config, params, streams[-1, 3:]).argmax(axis=-1)
    assert printed == expected.tolist()
