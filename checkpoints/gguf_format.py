"""The GGUF container: header, key-value metadata, tensor directory, mapped data.

The gguf package's own reader keeps an array for every string, which takes seconds for a large
vocabulary; a server should open a file in a fraction of one. Dequantisation is left to it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quant_shape_to_byte_shape

from checkpoints.errors import CheckpointError
from checkpoints.tensor_files import Array

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Value type in the file -> struct's and numpy's letter for it.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as it is stored.

    Attributes:
        kind: its quantisation.
        shape: of the values, slowest axis first.
        data: u8[..., bytes per row], mapped.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: Array


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Read a file's metadata, with arrays as lists, and map its tensors.

    Raises:
        CheckpointError: not a GGUF file, of another version, or cut short.
    """
    try:
        mapped: Array = np.memmap(file, dtype=np.uint8, mode="r")
        cursor = _Cursor(mapped.data)
        num_tensors, num_keys = _read_header(file, cursor)
        metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_keys)}
        directory = [_read_entry(cursor) for _ in range(num_tensors)]
    except (ValueError, struct.error) as error:
        raise CheckpointError(
            f"not a complete GGUF file ({error})",
            file=file,
            found=f"{file.stat().st_size} bytes",
            remedy="Download it again.",
        ) from error
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    data = mapped[cursor.offset + -cursor.offset % alignment :]
    return metadata, {entry.name: _map_tensor(file, entry, data) for entry in directory}


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Cursor:
    """Reads little-endian values in turn; struct.error or ValueError when there are no more."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.offset = 0

    def scalar(self, letter: str) -> Any:
        layout = "<" + letter
        (value,) = struct.unpack_from(layout, self.data, self.offset)
        self.offset += struct.calcsize(layout)
        return value

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.offset:
            raise ValueError(f"{size} bytes wanted at {self.offset} of {len(self.data)}")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def string(self) -> str:
        return str(self.take(self.scalar("Q")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            if element in _SCALARS:
                dtype = np.dtype("<" + _SCALARS[element])
                return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} at {self.offset}")
        return self.scalar(_SCALARS[kind])


def _read_header(file: Path, cursor: _Cursor) -> tuple[int, int]:
    """Number of tensors and of metadata keys."""
    magic = bytes(cursor.take(4))
    version = cursor.scalar("I")
    if magic != _MAGIC or version not in _VERSIONS:
        raise CheckpointError(
            "not a GGUF file that can be read",
            file=file,
            expected=f"{_MAGIC!r} and version {' or '.join(map(str, _VERSIONS))}, little-endian",
            found=f"{magic!r} and version {version}",
        )
    return cursor.scalar("Q"), cursor.scalar("Q")


def _read_entry(cursor: _Cursor) -> _Entry:
    name = cursor.string()
    # GGUF counts from the fastest axis.
    shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
    return _Entry(name, shape, cursor.scalar("I"), cursor.scalar("Q"))


def _map_tensor(file: Path, entry: _Entry, data: Array) -> GgufTensor:
    try:
        kind = GGMLQuantizationType(entry.kind)
        byte_shape = quant_shape_to_byte_shape(entry.shape, kind)
    except ValueError as error:
        raise CheckpointError(
            f"tensor {entry.name} is stored in a way that is not known ({error})",
            file=file,
            found=f"type {entry.kind}, shape {entry.shape}",
            remedy="Update the gguf package, or use another quantisation of this model.",
        ) from error
    size = int(np.prod(byte_shape, dtype=np.int64))
    stored = data[entry.offset : entry.offset + size]
    if len(stored) != size:
        raise CheckpointError(
            f"tensor {entry.name} is cut short",
            file=file,
            expected=f"{size} bytes",
            found=f"{len(stored)}",
            remedy="The file is incomplete: download it again.",
        )
    return GgufTensor(kind, entry.shape, stored.reshape(byte_shape))
