"""Stages of a check that end as stages should not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from bench.gpu.stage import Given
from bench.measure import Point


def raising(given: Given) -> Iterator[Point]:
    yield {"n": 1}
    raise ValueError("no such tile")


def crashing(given: Given) -> Iterator[Point]:
    yield {"n": 1}
    os.kill(os.getpid(), signal.SIGKILL)


def endless(given: Given) -> Iterator[Point]:
    yield {"n": 1}
    time.sleep(600)
