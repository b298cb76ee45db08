"""Who gets a core first, where the device is the CPU itself."""

from __future__ import annotations

import os
import threading
from pathlib import Path

NICE = 5
"""Of the threads that compute. They fill every core: without this, a request that comes waits for
its turn among them to be read, and a token to be sent."""


def put_computing_threads_last() -> None:
    """Let Python's threads, of this process and of others, go before those that XLA has made so
    far. Linux only: elsewhere, threads have no priority of their own."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return
    python = {thread.native_id for thread in threading.enumerate()}
    for task in tasks.iterdir():
        if int(task.name) not in python:
            os.setpriority(os.PRIO_PROCESS, int(task.name), NICE)
