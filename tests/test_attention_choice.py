"""Which attention an engine gets, and that its tokens do not depend on it."""

from __future__ import annotations

import logging
import random
import sys
from dataclasses import dataclass

import jax
import pytest
from engines import generate, make_engine, request

from jaxserve.errors import ConfigError
from jaxserve.models.attention import PagedAttention, choose_attention


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


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_a_jax_without_the_dialect_serves_all_the_same_and_says_so_once(name, monkeypatch, caplog):
    monkeypatch.setattr(jax, "devices", lambda: [Device("gpu", "9.0")])
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr("jax.experimental.pallas.triton", raising=False)
    with caplog.at_level(logging.INFO, "jaxserve.attention"):
        assert choose_attention(name).kind == "cpu"
    [record] = caplog.records
    assert "cpu" in record.message or "plain jnp" in record.message


def test_an_unknown_name_is_refused_with_the_known_ones():
    known = "auto, cpu, native, reference, triton"
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
