"""The cards that can be compiled for, and what is said when their compiler is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata, util

import pytest

from jaxserve.aot.target import TARGETS, find_ptxas, find_target
from jaxserve.cards import CARDS
from jaxserve.cli import main
from jaxserve.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "architecture", "shared_kib"),
    [("a100-80gb", "sm_80", 163), ("h100-80gb", "sm_90", 227), ("h200-141gb", "sm_90", 227)],
)
def test_every_target_is_a_known_card_of_its_architecture(name, architecture, shared_kib):
    found = find_target(name)
    assert found.architecture == architecture
    assert found.shared_bytes == shared_kib << 10
    assert name in CARDS


def test_there_is_a_description_for_every_target():
    assert [find_target(name).name for name in TARGETS] == list(TARGETS)
    with pytest.raises(ConfigError, match="no target description of 'l40s': there are a100-80gb"):
        find_target("l40s")


def no_package(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def other_version(name: str) -> str:
    return "0.10.2" if name == "jaxlib" else "0.10.1"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (no_package, "XLA's compiler for GPUs, is missing"),
        (other_version, "jax-cuda12-plugin is 0.10.1 but jaxlib 0.10.2"),
    ],
)
def test_a_missing_or_mismatched_plugin_is_one_line_with_the_remedy(
    monkeypatch, capsys, version, message
):
    jaxlib = metadata.version("jaxlib")
    monkeypatch.setattr(
        metadata,
        "version",
        lambda name: jaxlib if name == "jaxlib" and version is no_package else version(name),
    )
    assert main(["compile"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "pip install 'jaxserve[gpu-compile]'" in err
    assert err.count("\n") == 1


def test_a_missing_ptxas_is_told_with_the_remedy(monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ptxas.*is missing: run `pip install 'jaxserve\[gpu"):
        find_ptxas()


def test_without_a_driver_an_installed_compiler_does_not_stop_the_cpu_from_serving():
    """In a process of its own: jax decides once."""
    code = (
        "from jaxserve.aot.target import settle_for_cpu; settle_for_cpu(); import jax; "
        "print(jax.default_backend())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=environment,
    )
    assert done.stdout.strip() in ("cpu", "gpu")
    assert "Traceback" not in done.stderr
