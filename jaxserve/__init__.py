"""jaxserve: an LLM serving engine in JAX.

What a program needs, in reading order. Names load on first use: a process that only speaks HTTP
must not pay for importing jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.batch import BatchDescriptor as BatchDescriptor
    from jaxserve.batch import DeviceState as DeviceState
    from jaxserve.batch import PageTable as PageTable
    from jaxserve.batch import SamplingArrays as SamplingArrays
    from jaxserve.batch import StepOutput as StepOutput
    from jaxserve.batch import StepShape as StepShape
    from jaxserve.client.asynchronous import AsyncClient as AsyncClient
    from jaxserve.client.synchronous import Client as Client
    from jaxserve.config import EngineConfig as EngineConfig
    from jaxserve.config import ServerConfig as ServerConfig
    from jaxserve.engine import Engine as Engine
    from jaxserve.errors import APIError as APIError
    from jaxserve.errors import ConfigError as ConfigError
    from jaxserve.errors import ConnectionFailed as ConnectionFailed
    from jaxserve.errors import EngineStopped as EngineStopped
    from jaxserve.errors import JaxserveError as JaxserveError
    from jaxserve.errors import RequestError as RequestError
    from jaxserve.executor import JaxExecutor as JaxExecutor
    from jaxserve.models.decoder import Decoder as Decoder
    from jaxserve.offline.llm import LLM as LLM
    from jaxserve.offline.loop import Completion as Completion
    from jaxserve.packing import pack as pack
    from jaxserve.request import Request as Request
    from jaxserve.request import SamplingParams as SamplingParams
    from jaxserve.request import TokenEvent as TokenEvent
    from jaxserve.scheduler import Scheduler as Scheduler
    from jaxserve.startup import load_engine as load_engine
    from jaxserve.step import StepFn as StepFn
    from jaxserve.step import compile_step as compile_step
    from jaxserve.step import make_step as make_step

_HOME = {
    # Ask
    "Request": "request",
    "SamplingParams": "request",
    "TokenEvent": "request",
    # Generate here
    "LLM": "offline.llm",
    "Completion": "offline.loop",
    # Ask a server
    "Client": "client.synchronous",
    "AsyncClient": "client.asynchronous",
    # Run
    "EngineConfig": "config",
    "ServerConfig": "config",
    "load_engine": "startup",
    "Engine": "engine",
    "Scheduler": "scheduler",
    "JaxExecutor": "executor",
    # Write a step of your own
    "StepFn": "step",
    "make_step": "step",
    "compile_step": "step",
    "Decoder": "models.decoder",
    "BatchDescriptor": "batch",
    "PageTable": "batch",
    "SamplingArrays": "batch",
    "DeviceState": "batch",
    "StepOutput": "batch",
    "StepShape": "batch",
    "pack": "packing",
    # Handle what goes wrong
    "JaxserveError": "errors",
    "RequestError": "errors",
    "ConfigError": "errors",
    "EngineStopped": "errors",
    "APIError": "errors",
    "ConnectionFailed": "errors",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxserve.{_HOME[name]}"), name)
