"""Published tensors by name, read row by row from mapped files. Knows no model and no jax."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from checkpoints.errors import CheckpointError

Array = npt.NDArray[Any]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER_BYTES = 100 << 20


class TensorFiles(Protocol):
    """Where a checkpoint's tensors are."""

    def names(self) -> Collection[str]:
        """Every tensor in the checkpoint."""
        ...

    def file_of(self, name: str) -> str:
        """The file that holds (or should hold) a tensor, for messages."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype[Any]:
        """The narrowest float type that holds the tensor's values exactly."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Entries [start, stop) along the first axis, in `dtype(name)`."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    data: Array  # the tensor, mapped


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """The safetensors files of one folder, exactly those its index names."""

    folder: Path
    entries: dict[str, _Entry]

    def names(self) -> Collection[str]:
        return self.entries.keys()

    def file_of(self, name: str) -> str:
        return str(self.entries[name].file if name in self.entries else self.folder)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].data.shape

    def dtype(self, name: str) -> np.dtype[Any]:
        return self.entries[name].data.dtype

    def rows(self, name: str, start: int, stop: int) -> Array:
        return self.entries[name].data[start:stop]


def open_safetensors(folder: Path) -> SafetensorsFolder:
    """Map a folder's tensors: those of the index, or of the single file when there is no index.

    Raises:
        CheckpointError: no safetensors, a shard is missing or damaged, or does not hold a tensor
            that the index says it holds.
    """
    index = folder / INDEX_NAME
    if index.exists():
        return SafetensorsFolder(folder, _indexed_entries(folder, index))
    single = folder / SINGLE_NAME
    if single.exists():
        return SafetensorsFolder(folder, _file_entries(single))
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    raise CheckpointError(
        "no weights",
        file=folder,
        expected=f"{SINGLE_NAME} or {INDEX_NAME}",
        found=", ".join(others) or "no safetensors file",
        remedy="Finish the download, or convert the weights to safetensors.",
    )


def _indexed_entries(folder: Path, index: Path) -> dict[str, _Entry]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("no weight_map in the index", file=index)
    shards: dict[str, dict[str, _Entry]] = {}
    entries: dict[str, _Entry] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"tensor {name}: bad shard name", file=index, found=repr(shard))
        if shard not in shards:
            if not (folder / shard).exists():
                raise CheckpointError(
                    f"tensor {name}: shard {shard} does not exist",
                    file=index,
                    remedy="The download is incomplete: fetch the missing file.",
                )
            shards[shard] = _file_entries(folder / shard)
        if name not in shards[shard]:
            raise CheckpointError(
                f"tensor {name} is missing",
                file=folder / shard,
                expected=f"it here, because {index.name} says so",
                remedy="Index and shards are from different versions: download both again.",
            )
        entries[name] = shards[shard][name]
    _refuse_unindexed(index, weight_map, shards)
    return entries


def _refuse_unindexed(
    index: Path, weight_map: dict[str, str], shards: dict[str, dict[str, _Entry]]
) -> None:
    for shard, held in shards.items():
        unknown = sorted(name for name in held if weight_map.get(name) != shard)
        if unknown:
            raise CheckpointError(
                f"tensor {unknown[0]} is in {shard}",
                file=index,
                expected=f"{weight_map.get(unknown[0], 'no such tensor')} as in the index",
                remedy="Index and shards are from different versions: download both again.",
            )


def _file_entries(file: Path) -> dict[str, _Entry]:
    """The tensors of one safetensors file: 8-byte length, JSON header, raw little-endian data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))
        if not 2 <= header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                "not a complete safetensors file",
                file=file,
                expected=f"a header that fits in the file's {size} bytes",
                found=f"a header length of {header_bytes} bytes",
                remedy="Download it again.",
            )
        try:
            header = json.loads(stream.read(header_bytes))
        except ValueError as error:
            raise CheckpointError(f"damaged safetensors header ({error})", file=file) from error
    header.pop("__metadata__", None)
    mapped = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + header_bytes) if header else None
    return {name: _Entry(file, _view(file, name, spec, mapped)) for name, spec in header.items()}


def _view(file: Path, name: str, spec: dict[str, Any], mapped: Array | None) -> Array:
    assert mapped is not None
    dtype = _FLOAT_DTYPES.get(spec["dtype"])
    if dtype is None:
        raise CheckpointError(
            f"tensor {name} has a type that is not supported",
            file=file,
            expected="one of " + ", ".join(_FLOAT_DTYPES),
            found=spec["dtype"],
            remedy="Use an unquantised checkpoint, or a GGUF file.",
        )
    start, stop = spec["data_offsets"]
    expected = int(np.prod(spec["shape"], dtype=np.int64)) * dtype.itemsize
    if stop - start != expected or stop > len(mapped) or start < 0:
        raise CheckpointError(
            f"tensor {name} is cut short",
            file=file,
            expected=f"{expected} bytes for shape {tuple(spec['shape'])}",
            found=f"bytes {start} to {stop} of {len(mapped)}",
            remedy="The file is incomplete: download it again.",
        )
    return mapped[start:stop].view(dtype).reshape(spec["shape"])


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file; CheckpointError if it holds anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError("the file does not exist", file=file) from error
    except ValueError as error:
        raise CheckpointError(f"not valid JSON ({error})", file=file) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            "not a JSON object", file=file, expected="an object", found=type(content).__name__
        )
    return content
