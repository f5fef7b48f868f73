"""Safetensors files piece by piece: tensors are read and written one at a time.

The format is 8 bytes with the length of a header, the header (JSON: type, shape and place of every
tensor), and the tensors' bytes one after the other. The safetensors library writes only
from tensors that are all in memory, and reads by mapping whole files.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from megatron_logra.errors import UserError

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Types of weights, as the format calls them."""
_LONGEST_HEADER = 10**8  # bytes, as the safetensors library has it
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a file."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    """First byte, counted from the beginning of the file."""
    size: int
    """Number of bytes."""


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file, by name.

    Raises:
        UserError: there is no such file, or it is not a whole safetensors file.
    """
    if not path.exists():
        raise UserError(f"{path}: missing")
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {name: _entry(value, 8 + length) for name, value in header.items()}
        end = max((entry.start + entry.size for entry in found.values()), default=8 + length)
        if path.stat().st_size != end:
            raise ValueError(f"{path.stat().st_size} bytes, where its header says {end}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a complete safetensors file: {reason}") from None
    return found


def _entry(value: dict[str, Any], data: int) -> Entry:
    start, end = value["data_offsets"]
    entry = Entry(tuple(value["shape"]), value["dtype"], data + start, end - start)
    if (
        entry.dtype in DTYPES
        and entry.size != math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
    ):
        raise ValueError(f"{entry.size} bytes for {list(entry.shape)} of {entry.dtype}")
    return entry


def read_tensor(path: Path, name: str, entry: Entry, rows: tuple[int, int] | None = None) -> Tensor:
    """A tensor on the CPU, in memory of its own.

    Args:
        rows: the first row and the number of rows to read; default: all.

    Raises:
        UserError: it cannot be read, or is of a type that weights do not have.
    """
    if entry.dtype not in DTYPES:
        raise UserError(f"{path}: {name} is of type {entry.dtype}; expected {', '.join(DTYPES)}")
    dtype, shape, start = DTYPES[entry.dtype], entry.shape, entry.start
    if rows is not None:
        shape = (rows[1], *shape[1:])
        start += rows[0] * math.prod(shape[1:]) * dtype.itemsize
    size = math.prod(shape) * dtype.itemsize
    try:
        data = np.fromfile(path, np.uint8, size, offset=start)
    except OSError as error:
        raise UserError(f"{path}: cannot read {name}: {error}") from None
    if len(data) != size:
        raise UserError(f"{path}: cannot read {name}: the file ends within it")
    return torch.from_numpy(data).view(dtype).reshape(shape)


def file_head(
    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]], metadata: dict[str, str]
) -> bytes:
    """What comes before the tensors' bytes: the header and its length.

    Args:
        tensors: name, shape and type of each, in the order of their bytes.
        metadata: text that goes with them.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    for name, shape, dtype in tensors:
        end = place + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class Writer:
    """A file whose tensors are given one after the other.

    Args:
        path: the file.
        tensors: name, shape and type of each, in the order in which they will be written.
    """

    def __init__(
        self, path: Path, tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]]
    ) -> None:
        self._left = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in tensors)
        self._file: BinaryIO = path.open("wb")
        self._file.write(file_head(tensors, {"format": "pt"}))

    def write(self, piece: Tensor) -> None:
        """Write the bytes of the next tensor, or of the next piece of it, one below the other."""
        data = piece.contiguous().flatten().view(torch.uint8).numpy()
        self._left -= len(data)
        self._file.write(memoryview(data))

    def close(self) -> None:
        """Close a file to which all that was promised has been written."""
        self._file.close()
        if self._left:
            raise ValueError(f"{self._left} bytes of the announced tensors were not written")
