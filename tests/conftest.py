"""Settings every test runs under, and fixtures for more than one test file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from fixture_files import TINY
from live import LiveServer, live_server

import checkpoints

# Each of these finds real faults: a silent upcast, a broadcast nobody meant.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def tiny() -> Path:
    """Folder of small random checkpoints, one a family."""
    return TINY


@pytest.fixture(scope="session")
def model_store() -> checkpoints.Store:
    """The user's own store, so that the catalogue's models are downloaded once and not per run."""
    return checkpoints.Store(checkpoints.default_store_path())


def _pulled(name: str, store: checkpoints.Store) -> checkpoints.Checkpoint:
    checkpoints.pull(name, store, progress=lambda message, done, total: None)
    return checkpoints.open_checkpoint(name, store)


@pytest.fixture(scope="session")
def smollm2(model_store: checkpoints.Store) -> checkpoints.Checkpoint:
    """The catalogue's default model, pulled."""
    return _pulled("smollm2-135m-instruct", model_store)


@pytest.fixture(scope="session")
def gemma3_270m(model_store: checkpoints.Store) -> checkpoints.Checkpoint:
    """The catalogue's base model, pulled."""
    return _pulled("gemma-3-270m", model_store)


@pytest.fixture(scope="session")
def live(smollm2: checkpoints.Checkpoint) -> Iterator[LiveServer]:
    """The default model behind HTTP, shared by every test that only asks it things."""
    with live_server() as server:
        yield server
