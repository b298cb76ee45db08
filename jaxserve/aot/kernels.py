"""What the assembler says of every kernel: registers, spills, stack and shared memory."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve.aot.target import Target, find_ptxas
from jaxserve.errors import JaxserveError

TENSOR_CORE = ("mma.sync", "wgmma")
"""PTX instructions of the tensor cores: Ampere's and Hopper's."""


class AssemblerError(JaxserveError):
    """ptxas refused a kernel, or said nothing of it."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        name: its entry in the PTX.
        registers: of each thread; 255 is the most there are.
        spill_bytes: written to local memory because registers ran out.
        stack_bytes: of local memory, each thread's; arrays indexed at run time are there.
        shared_bytes: of shared memory, static and asked for at launch.
        tensor_core: it multiplies matrices on tensor cores.
        custom: it is one of ours, and not made by XLA.
    """

    name: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    tensor_core: bool = False
    custom: bool = False


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_LAUNCH = re.compile(r"kCustomKernel .*?\] +(\S+) grid: .*shared_memory: (\d+) bytes")


def parse_ptxas(text: str) -> list[Kernel]:
    """The kernels of what `ptxas -v` writes."""
    kernels = []
    parts = _ENTRY.split(text)
    for name, said in zip(parts[1::2], parts[2::2], strict=True):
        stack, used, shared = _STACK.search(said), _USED.search(said), _SHARED.search(said)
        if stack is None or used is None:
            raise AssemblerError(f"ptxas told nothing of the registers of {name}: {said.strip()}")
        kernels.append(
            Kernel(
                name,
                registers=int(used[1]),
                spill_bytes=int(stack[2]),
                stack_bytes=int(stack[1]),
                shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return kernels


def parse_launches(text: str) -> dict[str, int]:
    """Kernel names -> bytes of shared memory asked for at launch, of XLA's thunk sequence."""
    return {name: int(shared) for name, shared in _LAUNCH.findall(text)}


def assemble(ptx: Path, target: Target) -> list[Kernel]:
    """Assemble one dumped file. Files without an entry hold constants, and no kernel.

    Raises:
        AssemblerError: ptxas says no.
    """
    text = ptx.read_text()
    if ".entry" not in text:
        return []
    # The architecture with its own instructions (sm_90a) where the code asks for it.
    asked = re.search(r"^\.target (sm_\w+)", text, re.MULTILINE)
    architecture = asked[1] if asked else target.architecture
    command = [str(find_ptxas()), "-v", f"-arch={architecture}", str(ptx), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssemblerError(f"ptxas refused {ptx.name}: {done.stderr.strip()}")
    tensor_core = any(instruction in text for instruction in TENSOR_CORE)
    return [replace(kernel, tensor_core=tensor_core) for kernel in parse_ptxas(done.stderr)]


def read_kernels(dump: Path, target: Target, custom_names: Iterable[str]) -> list[Kernel]:
    """Every kernel of one module that XLA dumped into a folder, by name.

    Args:
        custom_names: of the kernels that are ours.
    """
    custom = set(custom_names)
    launches: dict[str, int] = {}
    for file in dump.glob("*.thunk_sequence.txt"):
        launches |= parse_launches(file.read_text())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(lambda ptx: assemble(ptx, target), sorted(dump.glob("*.ptx"))))
    return sorted(
        (
            replace(
                kernel,
                shared_bytes=max(kernel.shared_bytes, launches.get(kernel.name, 0)),
                custom=bool({kernel.name, without_number(kernel.name)} & custom),
            )
            for part in parts
            for kernel in part
        ),
        key=lambda kernel: kernel.name,
    )


def without_number(name: str) -> str:
    """The name of a kernel without what compilers append to tell it from others of that name."""
    return re.sub(r"_\d+$", "", name)
