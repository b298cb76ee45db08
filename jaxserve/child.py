"""A server of our own for as long as a command needs one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxserve.errors import EngineStopped

READY = re.compile(r"jaxserve ready on (?P<url>\S+)")
STOP_TIMEOUT = 20.0
"""Seconds a server gets to stop after SIGTERM."""


@contextmanager
def child_server(arguments: Sequence[str]) -> Iterator[str]:
    """`jaxserve serve` with these arguments on a free port; gives its URL. Gone afterwards.

    Ctrl-C does not reach it: it may be meant for an answer only.

    Raises:
        EngineStopped: it did not start; its own lines on stderr say why.
    """
    command = [sys.executable, "-m", "jaxserve", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None  # it was asked for
        ready = READY.match(process.stdout.readline())
        if ready is None:
            raise EngineStopped("the server did not start: the lines above say why")
        yield ready["url"]
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
