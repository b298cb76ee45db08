"""The commands that only compute: plan, simulate, compile."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from functools import partial
from pathlib import Path

from jaxserve.cards import Dtype, find_card
from jaxserve.errors import ConfigError
from jaxserve.flags.settings import config_of
from jaxserve.plan import find_model, make_plan
from jaxserve.plan.chart import write_chart
from jaxserve.plan.table import print_plan
from jaxserve.roofline import Roofline, model_shape
from jaxserve.simulate import MIXES, Bench, compare, read_trace
from jaxserve.simulate.chart import write_chart as write_load_chart
from jaxserve.simulate.report import report
from jaxserve.workload import Promise, Workload


def roofline(flags: argparse.Namespace) -> Roofline:
    """The model on the card that the flags describe."""
    card = find_card(flags.gpu, memory=flags.memory, bandwidth=flags.bandwidth, flops=flags.flops)
    dtype: Dtype = "float32" if card.name == "cpu" else "bfloat16"
    shape = model_shape(
        flags.model,
        find_model(flags.model, flags.store),
        weight_dtype=flags.weights or dtype,
        kv_dtype=flags.kv or dtype,
    )
    return Roofline(shape, card, flags.mfu, flags.overhead, flags.weights_only)


def run_plan(flags: argparse.Namespace) -> int:
    plan = make_plan(
        roofline(flags),
        config_of(Workload, flags),
        config_of(Promise, flags),
        memory_fraction=flags.memory_fraction,
        kv_memory=flags.kv_memory,
        min_prefill=flags.min_prefill,
    )
    if flags.plot is not None:
        write_chart(plan, flags.plot)
    if flags.json:
        print(plan.to_json())
    else:
        print_plan(plan)
    return 0


def run_simulate(flags: argparse.Namespace) -> int:
    mix = dataclasses.replace(MIXES[flags.mix], workload=config_of(Workload, flags))
    bench = Bench(
        roofline(flags),
        config_of(Promise, flags),
        mix,
        num_requests=flags.requests,
        seed=flags.seed,
        noise=flags.noise or 0.0,
        memory_fraction=flags.memory_fraction,
        trace=None if flags.trace is None else partial(read_trace, flags.trace),
    )
    comparison = compare(
        bench,
        flags.policies,
        loads=flags.loads,
        capacity=flags.capacity,
        progress=lambda line: print(line, file=sys.stderr),
    )
    if flags.plot is not None:
        write_load_chart(comparison, flags.plot)
    if flags.out is not None:
        write_text(flags.out, json.dumps(comparison.summary(), indent=2))
    print(comparison.to_json() if flags.json else report(comparison), end="")
    return 0


def run_compile(flags: argparse.Namespace) -> int:
    from jaxserve.aot.target import check_compiler, quiet_loading

    check_compiler()
    # XLA logs that it misses the card; what goes wrong it raises.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with quiet_loading():
        import jax

        # The compiler needs no device; looking for one it would not even load.
        jax.config.update("jax_platforms", "cpu")
        from jaxserve.aot.command import make_surveyor, save_executables
        from jaxserve.aot.report import print_survey
        from jaxserve.aot.result import ServerSizes

    model = find_model(flags.model, flags.store)
    flags.max_context = flags.max_context or model.max_context
    surveyor = make_surveyor(
        flags.model,
        model,
        find_card(flags.gpu),
        config_of(ServerSizes, flags),
        attention=flags.attention,
        mfu=flags.mfu,
        progress=lambda line: print(line, file=sys.stderr),
    )
    survey = surveyor.survey()
    if flags.out is not None:
        write_text(flags.out, survey.to_json())
    if flags.save is not None:
        save_executables(surveyor, survey, flags.save)
    if flags.json:
        print(survey.to_json())
    else:
        print_survey(survey)
    return 0


def write_text(file: Path, text: str) -> None:
    try:
        file.write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
