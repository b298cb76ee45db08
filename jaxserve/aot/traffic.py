"""What a compiled step moves through the card's memory, counted from its scheduled HLO.

Every kernel reads its operands and writes its result. Of an operand that a fusion only looks
something up in (gather, slice) the elements looked up count, and of a result that is updated in
place (scatter, dynamic-update-slice) the elements written. Kernels of ours are black boxes to
XLA: for them the `cost_estimate` they declare counts. Caches on the chip are left out of account.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.aot.hlo import Computation, Instruction, Module

FREE = frozenset(
    ("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "opt-barrier")
)
"""Opcodes that run nothing."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a piece of a program does.

    Attributes:
        bytes: read and written.
        flops: of matrix products.
        kernels: launched, copies by the device included.
        host_waits: times the host reads a value back before it can go on: at a conditional, and
            in each turn of a loop whose end depends on data.
        open_loops: such loops. Of these one turn is counted, so the sums are too small.
        unpriced: kernels of ours without a cost estimate: their whole operands are counted.
    """

    bytes: int = 0
    flops: int = 0
    kernels: int = 0
    host_waits: int = 0
    open_loops: int = 0
    unpriced: tuple[str, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.kernels + other.kernels,
            self.host_waits + other.host_waits,
            self.open_loops + other.open_loops,
            self.unpriced + other.unpriced,
        )

    def times(self, count: int) -> Work:
        return Work(
            self.bytes * count,
            self.flops * count,
            self.kernels * count,
            self.host_waits * count,
            self.open_loops,
            self.unpriced,
        )


@dataclass(frozen=True, slots=True)
class Price:
    """What one of our kernels says that it does: the sums over all its calls in a step.

    Attributes:
        calls: how many there are. bytes, flops: of all of them.
    """

    calls: int
    bytes: int
    flops: int


def step_work(module: Module, prices: Mapping[str, Price]) -> Work:
    """All of a step. Of a conditional the branch that moves least is counted.

    Args:
        module: the compiled step.
        prices: of the kernels that declare a cost, by name. Each call counts as the mean.
    """
    return _computation_work(module, module.entry, prices)


def _computation_work(
    module: Module, computation: Computation, prices: Mapping[str, Price]
) -> Work:
    total = Work()
    for instruction in computation:
        total += _work(module, computation, instruction, prices)
    return total


def _work(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    prices: Mapping[str, Price],
) -> Work:
    opcode = instruction.opcode

    def inside(name: str) -> Work:
        return _computation_work(module, module[name], prices)

    if opcode in FREE or opcode.endswith(("-done", "-update")):
        return Work()
    if opcode == "fusion":
        fused = module[instruction.called("calls")[0]]
        moved = sum(fusion_reads(module, fused)) + fusion_writes(fused)
        return Work(moved, fusion_flops(module, fused), 1)
    if opcode == "while":
        turn = sum(map(inside, instruction.called("condition", "body")), Work())
        if instruction.trip_count is not None:
            return turn.times(instruction.trip_count)
        return turn + Work(host_waits=1, open_loops=1)
    if opcode == "conditional":
        names = ("true_computation", "false_computation", "branch_computations")
        branches = map(inside, instruction.called(*names))
        return min(branches, key=lambda work: work.bytes) + Work(host_waits=1)
    if opcode == "custom-call":
        return _custom_call_work(computation, instruction, prices)
    if opcode in ("call", "async-start"):
        return inside(instruction.called("to_apply", "calls")[0])
    read = sum(computation.operand(instruction, i).bytes for i in range(len(instruction.operands)))
    return Work(2 * read if opcode == "copy-start" else read + instruction.bytes, 0, 1)


def _custom_call_work(
    computation: Computation, instruction: Instruction, prices: Mapping[str, Price]
) -> Work:
    name = custom_kernel(instruction)
    if price := prices.get(name or ""):
        return Work(price.bytes // price.calls, price.flops // price.calls, 1)
    operands = [computation.operand(instruction, i) for i in range(len(instruction.operands))]
    read = sum(operand.bytes for operand in operands)
    if (instruction.attribute("custom_call_target") or "").startswith("__cublas"):
        left, right, product = (x.arrays[0].size for x in (*operands[:2], instruction))
        # [M, K] times [K, N]: K is what the sizes leave. A second result is scratch space.
        contracted = math.isqrt(left * right // product)
        return Work(read + instruction.arrays[0].bytes, 2 * product * contracted, 1)
    return Work(read + instruction.bytes, 0, 1, unpriced=(name,) if name else ())


def custom_kernel(instruction: Instruction) -> str | None:
    """The name of the Pallas kernel that a custom call is; None if it is something else."""
    target = instruction.attribute("custom_call_target")
    if target == "mosaic_gpu_v2":  # the scope of the primitive that launches it
        return instruction.op_name.split("/")[-2]
    if target != "__gpu$xla.gpu.triton":
        return None
    names = re.findall(r'[{ ]name = "([^"]+)"', instruction.attributes)
    return str(names[-1]) if names else None


def fusion_reads(module: Module, fused: Computation) -> list[int]:
    """Bytes a fusion reads of each of its operands."""
    needed = _needed_elements(module, fused)
    return [
        math.ceil(needed.get(parameter.name, 0) * parameter.arrays[0].itemsize)
        for _, parameter in sorted(fused.parameters.items())
    ]


def fusion_writes(fused: Computation) -> int:
    """Bytes a fusion writes."""
    return sum(
        fused.operand(update, _updates(update)).bytes if in_place else output.bytes
        for output, update, in_place in outputs(fused)
    )


def outputs(fused: Computation) -> list[tuple[Instruction, Instruction, bool]]:
    """For each result of a fusion: it, what computes it, and whether that updates an operand of
    the fusion in place."""
    root = fused.root
    results = [root]
    if root.opcode == "tuple":
        results = [fused.operand(root, i) for i in range(len(root.operands))]
    found = []
    for result in results:
        source = fused.source(result)
        in_place = (
            source.opcode in ("scatter", "dynamic-update-slice")
            and fused.source(fused.operand(source, 0)).opcode == "parameter"
        )
        found.append((result, source, in_place))
    return found


def _updates(update: Instruction) -> int:
    return 1 if update.opcode == "dynamic-update-slice" else 2


def fusion_flops(module: Module, fused: Computation) -> int:
    """Of the matrix products in a fusion, and in what it is nested of."""
    total = 0
    for instruction in fused:
        if instruction.opcode == "dot":
            left = fused.operand(instruction, 0).arrays[0]
            contracted = instruction.dims["lhs_contracting_dims"]
            total += 2 * instruction.size * math.prod(left.dims[i] for i in contracted)
        elif instruction.opcode in ("fusion", "call"):
            for name in instruction.called("calls", "to_apply"):
                total += fusion_flops(module, module[name])
    return total


def _needed_elements(module: Module, fused: Computation) -> dict[str, int]:
    """How many elements of each value in a fusion take part in its results."""
    needed: dict[str, int] = {fused.root.name: fused.root.size}
    in_place = {update.name for _, update, yes in outputs(fused) if yes}
    for instruction in reversed(list(fused)):
        wanted = needed.get(instruction.name, 0)
        if not wanted:
            continue
        for index, name in enumerate(instruction.operands):
            if index == 0 and instruction.name in in_place:
                continue
            operand = fused.instructions[name]
            part = _wanted_of(module, instruction, index, operand.size, wanted)
            needed[name] = max(needed.get(name, 0), part)
    return needed


_LOOKUPS = frozenset(("gather", "dynamic-slice", "slice"))
_WHOLE = frozenset(
    ("dot", "tuple", "concatenate", "pad", "sort", "scatter", "dynamic-update-slice")
)


def _wanted_of(module: Module, instruction: Instruction, index: int, size: int, wanted: int) -> int:
    """Elements of an operand of `size` that go into `wanted` elements of the result."""
    opcode = instruction.opcode
    if opcode in ("fusion", "call"):
        inner = module[instruction.called("calls", "to_apply")[0]]
        return _needed_elements(module, inner).get(inner.parameters[index].name, 0)
    if opcode in _WHOLE or (opcode in _LOOKUPS and index > 0):
        return size
    if opcode.startswith("reduce"):
        return math.ceil(size * wanted / instruction.size)
    return min(size, wanted)
