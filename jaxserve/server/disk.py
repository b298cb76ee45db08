"""Writing to disk so that a crash leaves the old content or the new, and never half of either."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from jaxserve.errors import ConfigError


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file's content."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def cut_broken_line(path: Path) -> None:
    """Take off what follows the last newline: the process ended while it wrote that."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def lock(folder: Path) -> BinaryIO:
    """Make a folder if need be and keep other processes out of it until the file is closed.

    Raises:
        ConfigError: another process has it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("wb")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(f"another server uses {folder}") from error
    return file
