"""What Pallas' Mosaic compiler tells of its kernels, of which XLA's own dumps say nothing.

It has a kernel assembled while XLA compiles the program around it, by a ptxas that it finds itself,
and writes the PTX, and what ptxas said, into a folder that an environment variable names. That
ptxas may be newer than the one found here, which would then not read the PTX. A process assembles
equal kernels once, in whichever program they are: what was said of one is kept here, by the hash
that programs call it by.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jaxserve.aot.hlo import Module
from jaxserve.aot.kernels import AssemblerError, Kernel, parse_ptxas, without_number
from jaxserve.aot.result import worst
from jaxserve.aot.target import quiet_loading
from jaxserve.aot.traffic import custom_kernel

VARIABLE = "MOSAIC_GPU_DUMP_TO"

_SHARED = re.compile(r"dynamic_shared_memory_size %c(\d+)_i32")
_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')

_told: dict[str, Kernel] = {}
"""By the hash of the kernel: of all that this process has assembled."""


@contextmanager
def mosaic_dump(folder: Path) -> Iterator[None]:
    """Lower and compile in here, one program at a time: the variable is the whole process's.

    stderr is held back meanwhile, unless it ends in an error: the compiler complains that it
    cannot disassemble as well, for want of a tool that nothing here needs.
    """
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder)
    try:
        with quiet_loading():
            yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def parse_dump(folder: Path) -> dict[str, Kernel]:
    """By name, the kernels that were assembled; the worst of those that share one.

    Shared memory is what the launch asks for.
    """
    asked: dict[str, int] = {}
    for file in folder.glob("*.after_layout_inference.txt"):
        name = without_number(file.name.partition(".")[0])
        sizes = map(int, _SHARED.findall(file.read_text()))
        asked[name] = max(asked.get(name, 0), *sizes)
    found = []
    for file in folder.glob("*.ptxas"):
        name = without_number(file.stem)
        tensor_core = "wgmma.mma_async" in file.with_suffix(".ptx").read_text()
        found += [
            replace(
                kernel,
                name=name,
                shared_bytes=asked[name],
                tensor_core=tensor_core,
                custom=True,
            )
            for kernel in parse_ptxas(file.read_text())
        ]
    return {kernel.name: kernel for kernel in worst(found)}


def mosaic_kernels(module: Module, folder: Path) -> list[Kernel]:
    """The Mosaic kernels of a compiled program that was dumped into a folder.

    Raises:
        AssemblerError: nothing was said of one.
    """
    dumped, found = parse_dump(folder), []
    for instruction in module.entry:
        name, called = custom_kernel(instruction), _HASH.search(instruction.attributes)
        if name is None or called is None:
            continue
        if called[1] not in _told:
            if name not in dumped:
                raise AssemblerError(f"Mosaic's compiler told nothing of {name}")
            _told[called[1]] = dumped[name]
        found.append(_told[called[1]])
    return list(worst(found))
