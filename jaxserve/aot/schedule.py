"""What a compiled step launches, layer by layer, and what it copies that it should not."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from itertools import pairwise

from jaxserve.aot.hlo import Array, Computation, Instruction, Module
from jaxserve.aot.traffic import FREE, custom_kernel, outputs

MIN_COPY_BYTES = 256 << 10
"""Smaller arguments than this are settings and norms, which may be moved about."""
ANY_TYPE = ""


def launched(module: Module) -> Iterator[tuple[Computation, Instruction]]:
    """Everything a step runs, in order. Bodies of loops and branches of conditionals follow the
    instruction they belong to, once each."""
    yield from _launched(module, module.entry)


def _launched(
    module: Module, computation: Computation
) -> Iterator[tuple[Computation, Instruction]]:
    for instruction in computation:
        if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
            continue
        yield computation, instruction
        if instruction.opcode in ("while", "conditional", "call", "async-start"):
            names = ("condition", "body", "to_apply", "calls")
            branches = ("true_computation", "false_computation", "branch_computations")
            for name in instruction.called(*names, *branches):
                yield from _launched(module, module[name])


def kernels_per_layer(module: Module) -> int:
    """Launches from where one layer's arguments are first read to where the next one's are: the
    median over the layers. All launches if there is but one layer."""
    first: dict[int, int] = {}
    count = 0
    for computation, instruction in launched(module):
        if instruction.opcode in ("while", "conditional", "call", "async-start"):
            continue
        for index in range(len(instruction.operands)):
            source = computation.source(computation.operand(instruction, index))
            if source.opcode == "parameter" and computation is module.entry:
                layer = re.search(r"\['layers'\]\[(\d+)\]", source.op_name)
                if layer:
                    first.setdefault(int(layer[1]), count)
        count += 1
    starts = [first[layer] for layer in sorted(first)]
    gaps = [after - before for before, after in pairwise(starts)]
    return statistics.median_low(gaps) if gaps else count


def copies(module: Module) -> list[str]:
    """Launches that make an array as large as a weight matrix, or as one layer's keys or values:
    that is what a copy of one looks like, transposed, converted or as it is. Counts of tokens are
    as large as a step's logits and never converted: of them a copy has their type, too.

    Not those that update one in place, and not a kernel's aliased results. Kernels of ours are
    given weights by nobody, and partial sums of theirs may be as large as one: of them only what
    is as large as pages, and of their type, counts.
    """
    protected: dict[tuple[str, int], str] = {}
    pages: set[tuple[str, int]] = set()
    for parameter in module.entry.parameters.values():
        array = parameter.arrays[0]
        if len(array.dims) > 1 and parameter.bytes >= MIN_COPY_BYTES:
            if parameter.op_name.startswith("state.rules"):
                protected[array.dtype, array.size] = parameter.op_name
            elif parameter.op_name.startswith(("params", "state")):
                protected[ANY_TYPE, array.size] = parameter.op_name
            if parameter.op_name.startswith("state"):
                pages.add((array.dtype, array.size))
    found = []
    for _, instruction in launched(module):
        ours = custom_kernel(instruction) is not None
        for array in _made(module, instruction):
            if ours and (array.dtype, array.size) not in pages:
                continue
            for key in ((ANY_TYPE, array.size), (array.dtype, array.size)):
                if key in protected:
                    found.append(f"{instruction.name} is as large as {protected[key]}")
    return found


def _made(module: Module, instruction: Instruction) -> list[Array]:
    """The arrays that an instruction makes anew; none where it is a product by cuBLAS."""
    if instruction.opcode in ("while", "conditional", "call", "async-start"):
        return []
    if (instruction.attribute("custom_call_target") or "").startswith("__cublas"):
        return []
    if instruction.opcode == "fusion":
        fused = module[instruction.called("calls")[0]]
        return [result.arrays[0] for result, _, in_place in outputs(fused) if not in_place]
    if instruction.opcode == "copy-start":
        return [instruction.arrays[0]]
    aliased = re.search(r"output_to_operand_aliasing=\{(.*?\)) *\}", instruction.attributes)
    kept = {int(i or 0) for i in re.findall(r"\{(\d*)\}: \(", aliased[1])} if aliased else set()
    return [array for i, array in enumerate(instruction.arrays) if i not in kept]
