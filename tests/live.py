"""A real `jaxserve serve` of the default model in a process of its own, and clients for it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
START_TIMEOUT = 240.0  # a machine that never compiled these shapes compiles them now
FLAGS = ["--port", "0", "--max-rows", "8", "--token-budget", "32", "--max-context", "1024"]


@dataclass
class LiveServer:
    """The process and what it printed.

    Attributes:
        url: of its root, without a slash at the end.
    """

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return reply.read().decode()

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        match = re.search(rf"^{name} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert match, f"/metrics has no {name}"
        return float(match[1])

    def wait_for_metric(self, name: str, value: float, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.1)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@contextmanager
def live_server(*flags: str) -> Iterator[LiveServer]:
    """Start a server, wait for its ready line, stop it in the end."""
    command = [sys.executable, "-m", "jaxserve", "serve", *FLAGS, *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    server = LiveServer(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line)
            if match := re.match(r"jaxserve ready on (http://\S+)", line):
                server.url = match[1]
                ready.set()
        ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(START_TIMEOUT), f"no ready line: {server.lines}"
        assert server.url, f"the server ended instead: {''.join(server.lines)}"
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(timeout=10)
        assert process.stdout is not None
        process.stdout.close()
