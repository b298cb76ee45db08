"""Compiles the C++ kernels once for this machine, and makes them known to XLA."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jaxlib.version

logger = logging.getLogger("jaxserve.native")

FUNCTIONS = ("jaxserve_linear", "jaxserve_paged_attention", "jaxserve_write_kv")
FLAGS: tuple[str, ...] = ("-std=c++20", "-O3", "-march=native", "-w", "-fPIC")
FLAGS += ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
COMPILERS = ("c++", "g++", "clang++")
FOLDER = Path(__file__).parent


@functools.cache
def has_native() -> bool:
    """Whether the kernels can be called here: compiles and loads them, the first time.

    `JAXSERVE_NATIVE=0` in the environment says no. A log line tells why not.
    """
    if os.environ.get("JAXSERVE_NATIVE") == "0":
        return False
    try:
        library = _library()
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("no C++ kernels for the CPU, plain jnp instead: %s", _reason(error))
        return False
    for name in FUNCTIONS:
        capsule = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return True


@functools.cache
def has_amx() -> bool:
    """Whether the kernels multiply in Intel's matrix units (AMX): the CPU has them, the operating
    system lets us, and `JAXSERVE_AMX` in the environment is not 0."""
    if os.environ.get("JAXSERVE_AMX") == "0" or not has_native():
        return False
    request = _library().jaxserve_request_amx
    request.restype = ctypes.c_bool
    return bool(request())


def require_native() -> None:
    """Make the kernels callable. Raises RuntimeError where they cannot be compiled."""
    if not has_native():
        raise RuntimeError("the C++ kernels need a C++ compiler: g++ or clang++")


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_compiled()))


def _compiled() -> Path:
    """The shared library, from the cache or made now. Raises OSError or SubprocessError."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError(f"none of {', '.join(COMPILERS)} is installed")
    sources = sorted(FOLDER.glob("*.cc"))
    made_of = [jaxlib.version.__version__, compiler, *FLAGS, _machine()]
    made_of += [path.read_text() for path in (*sources, *sorted(FOLDER.glob("*.h")))]
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    path = _cache() / f"kernels-{name}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            _compile(compiler, sources, Path(scratch))
            os.replace(Path(scratch, "kernels.so"), path)  # whole, or not at all
    return path


def _compile(compiler: str, sources: list[Path], scratch: Path) -> None:
    include = f"-I{jax.ffi.include_dir()}"

    def run(*arguments: str | Path) -> None:
        subprocess.run([compiler, *FLAGS, *arguments], check=True, capture_output=True)

    def compile_one(source: Path) -> Path:
        target = scratch / f"{source.stem}.o"
        run(include, "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, sources))
    run("-shared", *objects, "-o", scratch / "kernels.so")


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "jaxserve", "native")


def _machine() -> str:
    """What -march=native depends on: a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    flags = (line for line in lines if line.startswith(("flags", "Features", "model name")))
    return "\n".join(sorted(set(flags)))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr or b"").decode(errors="replace").strip().splitlines()[0]
    return str(error)
