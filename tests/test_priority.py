"""Python's threads go before those that compute."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, threading
from pathlib import Path
import jax, jax.numpy as jnp
from jaxserve.priority import NICE, put_computing_threads_last

(jnp.ones((500, 500)) @ jnp.ones((500, 500))).block_until_ready()
stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
put_computing_threads_last()
python = {thread.native_id for thread in threading.enumerate()}
tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
nice = {task: os.getpriority(os.PRIO_PROCESS, task) for task in tasks}
assert len(python) == 2 and all(nice[task] == 0 for task in python), nice
others = [value for task, value in nice.items() if task not in python]
assert len(others) >= 1 and set(others) == {NICE}, nice
(jnp.ones((500, 500)) @ jnp.ones((500, 500))).block_until_ready()
"""


def test_threads_that_compute_are_put_behind_those_that_run_python():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
