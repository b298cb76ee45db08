"""Which attention an engine gets, and that its tokens do not depend on it."""

from __future__ import annotations

import logging
import random
import sys
from dataclasses import dataclass
from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from engines import generate, make_engine, request

from jaxserve.cli import make_parser
from jaxserve.errors import ConfigError
from jaxserve.models.attention import AttentionKind, PagedAttention, choose_attention
from pallas_kernels.mosaic.support import OFFERED, Wanted


@dataclass(frozen=True)
class Device:
    """What is asked of a device."""

    platform: str
    compute_capability: str
    device_kind: str = "a card"


@pytest.mark.parametrize(
    "name, device, expected",
    [
        ("auto", Device("cpu", ""), PagedAttention("native")),
        ("native", Device("cpu", ""), PagedAttention("native")),
        ("auto", Device("gpu", "8.0"), PagedAttention("triton", "sm_80")),
        ("auto", Device("gpu", "8.9"), PagedAttention("triton", "sm_80")),
        ("auto", Device("gpu", "9.0"), PagedAttention("triton", "sm_90")),
        ("auto", Device("gpu", "7.5"), PagedAttention("cpu")),
        ("auto", Device("gpu", "gfx942"), PagedAttention("cpu")),
        ("cpu", Device("gpu", "9.0"), PagedAttention("cpu", "sm_90")),
        ("triton", Device("cpu", ""), PagedAttention("triton", interpret=True)),
        ("reference", Device("cpu", ""), PagedAttention("reference")),
    ],
)
def test_the_device_and_the_settings_decide(name, device, expected, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr("jaxserve.models.attention.has_native", lambda: True)
    assert choose_attention(name) == expected


def test_the_cpus_kernels_are_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Device("gpu", "9.0")])
    with pytest.raises(ConfigError, match="'native' needs a CPU"):
        choose_attention("native")


HOPPER = "mosaic" if OFFERED else "cpu"
"""What a Hopper gets where there is no Triton."""
FLOAT32 = Wanted(128, 4, 16, jnp.dtype("float32"), jnp.dtype("float32"))


@pytest.mark.parametrize("name", ["auto", "triton"])
@pytest.mark.parametrize(
    ("capability", "wanted", "expected"),
    [("9.0", None, HOPPER), ("9.0", FLOAT32, "cpu"), ("8.0", None, "cpu"), ("10.0", None, "cpu")],
)
def test_a_jax_without_triton_serves_all_the_same_and_says_so_once(
    name, capability, wanted, expected, monkeypatch, caplog
):
    monkeypatch.setattr(jax, "devices", lambda: [Device("gpu", capability)])
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr("jax.experimental.pallas.triton", raising=False)
    with caplog.at_level(logging.INFO, "jaxserve.attention"):
        assert choose_attention(name, wanted).kind == expected
    [record] = caplog.records
    assert record.message.endswith(f": {expected}") or record.message.endswith(f"is {expected}")


@pytest.mark.parametrize(
    ("device", "wanted", "told"),
    [
        (
            Device("gpu", "8.0", "an A100"),
            None,
            "needs a GPU of compute capability 9.0, this is an A",
        ),
        (Device("gpu", "9.0"), FLOAT32, "queries are float32 and the cache is float32"),
    ],
)
def test_mosaic_where_it_cannot_be_is_refused_with_the_reason(device, wanted, told, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [device])
    if wanted is not None and not OFFERED:
        told = r"needs jax 0\.11 or later"
    with pytest.raises(ConfigError, match=f"'mosaic': .*{told}"):
        choose_attention("mosaic", wanted)


def test_mosaic_is_taken_where_it_is_asked_for_and_offered(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Device("gpu", "9.0")])
    if OFFERED:
        assert choose_attention("mosaic") == PagedAttention("mosaic", "sm_90")
    else:
        with pytest.raises(ConfigError, match=r"needs jax 0\.11 or later, this is 0\.10"):
            choose_attention("mosaic")


def test_every_kind_can_be_asked_for_on_the_command_line():
    for kind in ("auto", *get_args(AttentionKind)):
        flags = make_parser().parse_args(["serve", "--attention", kind])
        assert flags.attention == kind


def test_an_unknown_name_is_refused_with_the_known_ones():
    known = "auto, cpu, native, reference, triton, mosaic"
    with pytest.raises(ConfigError, match=f"'cuda' is not one of {known}"):
        choose_attention("cuda")


def test_an_engine_draws_the_same_tokens_with_every_kind_of_attention():
    family = "mistral-window"
    rng = random.Random(0)
    requests = [
        request(
            str(i),
            [rng.randrange(5, 300) for _ in range(length)],
            12,
            temperature=float(i % 2),
            seed=i,
        )
        for i, length in enumerate((3, 40, 77, 1, 18))
    ]
    expected = generate(make_engine(family, attention=PagedAttention("reference")), requests)
    # Prompts in chunks, decodes beside them.
    for attention in (PagedAttention("triton", interpret=True), PagedAttention("native")):
        engine = make_engine(family, token_budget=24, attention=attention)
        assert generate(engine, requests) == expected
