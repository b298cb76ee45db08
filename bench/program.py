"""A benchmark as a program: its exit code, and its errors in a line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import aiohttp

from bench.measure import BenchError
from checkpoints import CheckpointError
from jaxserve.errors import JaxserveError


def exit_code(work: Callable[[], object]) -> int:
    """Do the work: 0, or 1 and what was wrong, or 130 for Ctrl-C."""
    try:
        work()
    except (BenchError, CheckpointError, JaxserveError, aiohttp.ClientError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("bench: interrupted", file=sys.stderr)
        return 130
    return 0
