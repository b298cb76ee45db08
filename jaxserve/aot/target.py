"""The cards that can be compiled for without one, and the compiler that does it. Loads no jax
until it is asked to compile."""

from __future__ import annotations

import ctypes
import os
import pkgutil
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata, resources, util
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

TARGETS = ("a100-80gb", "h100-80gb", "h200-141gb")
"""Names as in `cards.CARDS`."""

REMEDY = "run `pip install 'jaxserve[gpu-compile]'`"


@dataclass(frozen=True, slots=True)
class Target:
    """A card as XLA's compiler sees it.

    Attributes:
        name: as in `cards.CARDS`.
        description: XLA's GpuTargetConfigProto in text form.
    """

    name: str
    description: str

    @property
    def architecture(self) -> str:
        """What ptxas calls it: sm_80."""
        capability = re.search(
            r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))? \}", self.description
        )
        if capability is None:
            raise ConfigError(f"{self.name}: no cuda_compute_capability in its description")
        return f"sm_{capability[1]}{capability[2] or 0}"

    @property
    def shared_bytes(self) -> int:
        """Shared memory one block of threads may have."""
        limit = re.search(r"shared_memory_per_block_optin: (\d+)", self.description)
        if limit is None:
            raise ConfigError(f"{self.name}: no shared_memory_per_block_optin in its description")
        return int(limit[1])


def find_target(name: str) -> Target:
    """The description of a card.

    Raises:
        ConfigError: there is none.
    """
    if name not in TARGETS:
        raise ConfigError(f"no target description of {name!r}: there are {', '.join(TARGETS)}")
    file = resources.files("jaxserve.aot").joinpath("targets", f"{name}.pbtxt")
    return Target(name, file.read_text())


def check_compiler() -> None:
    """See that the GPU compiler is installed and of jax's own version.

    Raises:
        ConfigError: it is not, with the remedy.
    """
    jax_version = metadata.version("jaxlib")
    for name in ("jax-cuda12-plugin", "jax-cuda12-pjrt"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError as error:
            raise ConfigError(f"{name}, XLA's compiler for GPUs, is missing: {REMEDY}") from error
        if version != jax_version:
            raise ConfigError(f"{name} is {version} but jaxlib {jax_version}: {REMEDY}")
    find_ptxas()


def find_ptxas() -> Path:
    """NVIDIA's assembler, of the wheel `nvidia-cuda-nvcc-cu12`.

    Raises:
        ConfigError: it is not installed.
    """
    spec = util.find_spec("nvidia")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        file = Path(folder) / "cuda_nvcc" / "bin" / "ptxas"
        if file.is_file():
            return file
    raise ConfigError(f"ptxas, of the package nvidia-cuda-nvcc-cu12, is missing: {REMEDY}")


def make_mesh(target: Target) -> Mesh:
    """A mesh of one described device: what shardings of arguments to compile for are made of.

    Where there is no GPU jax must have been told `jax_platforms=cpu` before its first use:
    otherwise the plugin looks for a driver, and does not load without one.

    Raises:
        ConfigError: the compiler is missing, of another version than jax, or did not load.
    """
    check_compiler()
    from jax.experimental import topologies

    with quiet_loading():
        try:
            topology = topologies.get_topology_desc(
                "", "cuda", topology="1x1x1", target_config=target.description
            )
        except NotImplementedError as error:
            raise ConfigError(
                f"XLA's compiler for GPUs did not load ({error}): without a GPU, set "
                "jax_platforms to cpu before jax is first used"
            ) from error
    return topologies.make_mesh(topology, (1,), ("gpu",))


def settle_for_cpu() -> None:
    """Where the compiler is installed but no driver, tell jax to use the CPU.

    It would come to that by itself, but not before it has logged a traceback for want of CUDA.
    To be called before jax is first used; what the user set stands.
    """
    import jax

    spec = util.find_spec("jax_plugins")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    plugins = {module.name for module in pkgutil.iter_modules(folders)}
    chosen = getattr(jax.config, "jax_platforms", None)
    if chosen or plugins != {"xla_cuda12"} or util.find_spec("libtpu"):
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        jax.config.update("jax_platforms", "cpu")


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hold back what is written to stderr, unless it ends in an error.

    The plugin's libraries say on loading, past Python's logging, that there is no GPU: here that
    is the point.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(kept, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
