"""XLA's scheduled HLO as data: computations of instructions, read from the text it prints.

Only what counting needs is kept. Knows nothing of steps and models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}


@dataclass(frozen=True, slots=True)
class Array:
    """An array an instruction makes. dtype as HLO spells it: f32, bf16, s32, pred."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def itemsize(self) -> float:
        """Bytes of an element; 0 of a token."""
        if self.dtype in _BITS:
            return _BITS[self.dtype] / 8
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return int(bits[1]) / 8 if bits else 0

    @property
    def bytes(self) -> int:
        return math.ceil(self.size * self.itemsize)


@dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
        name: without the %.
        arrays: that it makes; several if it makes a tuple.
        opcode: "fusion", "custom-call", ...
        operands: names.
        literal: what stands between the parentheses.
        attributes: the rest of the line.
        is_root: its result is the computation's.
    """

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def size(self) -> int:
        return sum(array.size for array in self.arrays)

    def attribute(self, name: str) -> str | None:
        """The value of `name=value` or `name="value"`."""
        found = re.search(rf'(?:^|[ ,]){name}="?([^",\s]+)', self.attributes)
        return found[1] if found else None

    def called(self, *names: str) -> tuple[str, ...]:
        """Computations that the attributes of these names call."""
        found: list[str] = []
        for name in names:
            for one, many in re.findall(
                rf"(?:^|[ ,]){name}=(?:%([\w.\-]+)|\{{([^}}]*)\}})", self.attributes
            ):
                found += [one] if one else re.findall(r"%([\w.\-]+)", many)
        return tuple(found)

    @property
    def op_name(self) -> str:
        """Where in the program it comes from; of a parameter, its path in the arguments."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1].replace("\\", "") if found else ""

    @property
    def trip_count(self) -> int | None:
        """Turns of a while loop, if XLA knows them."""
        found = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @property
    def dims(self) -> dict[str, tuple[int, ...]]:
        """Attributes that are lists of numbers: dimensions, lhs_contracting_dims, ..."""
        return {
            name: tuple(map(int, filter(None, numbers.split(","))))
            for name, numbers in re.findall(r"(\w+)=\{([\d,]*)\}", self.attributes)
        }


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in their order: of the entry, the order they run in."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def root(self) -> Instruction:
        return next(x for x in self.instructions.values() if x.is_root)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(x.literal): x for x in self if x.opcode == "parameter"}

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        return self.instructions[instruction.operands[index]]

    def source(self, instruction: Instruction) -> Instruction:
        """Where its buffer comes from: through bitcasts, and out of tuples made here."""
        while True:
            if instruction.opcode == "bitcast":
                instruction = self.operand(instruction, 0)
            elif (
                instruction.opcode == "get-tuple-element"
                and self.operand(instruction, 0).opcode == "tuple"
            ):
                made = self.operand(instruction, 0)
                instruction = self.operand(made, int(instruction.attribute("index") or 0))
            else:
                return instruction


@dataclass(frozen=True)
class Module:
    """A whole program."""

    computations: dict[str, Computation]
    entry: Computation

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]


_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


def parse_hlo(text: str) -> Module:
    """Read what `Compiled.as_text()` gives.

    Raises:
        ValueError: there is no entry computation in it.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = Computation(header[2])
            entry = current if header[1] else entry
        elif current is not None and (found := _LINE.match(line)):
            instruction = _instruction(*found.groups())
            current.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("no ENTRY computation in this HLO")
    return Module(computations, entry)


def _instruction(root: str | None, name: str, shape: str, opcode: str, rest: str) -> Instruction:
    depth, end = 1, 0
    while depth and end < len(rest):
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        end += 1
    literal = rest[: end - 1]
    return Instruction(
        name=name,
        arrays=tuple(
            Array(dtype, tuple(map(int, filter(None, dims.split(",")))))
            for dtype, dims in _ARRAY.findall(shape)
        ),
        opcode=opcode,
        operands=tuple(re.findall(r"%([\w.\-]+)", literal)),
        literal=literal,
        attributes=rest[end:],
        is_root=root is not None,
    )
