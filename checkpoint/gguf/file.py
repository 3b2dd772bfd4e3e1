"""The GGUF format: typed metadata and the places of tensors.

The source is ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from checkpoint.validation import is_whole
from contracts.errors import ConfigError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """The description of one tensor.

    `shape` is in row-major order, although GGUF stores the fastest dimension first; `offset` is in bytes from the start
    of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the header only.

        Raise ConfigError if the file is not GGUF, is cut short, or has unknown tensor types.
        """
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the GGUF file {path}: {error}") from error
        try:
            metadata, tensors = _read_header(data.data)
        except (struct.error, UnicodeDecodeError, KeyError, ValueError, IndexError, RecursionError) as error:
            raise _damaged(path, f"its header is damaged or cut short ({error})") from error
        for tensor in tensors:
            if tensor.offset + tensor.nbytes > len(data):
                raise _damaged(path, f"it ends inside the tensor '{tensor.name}' ({len(data)} bytes)")
        return cls(path, metadata, {tensor.name: tensor for tensor in tensors})

    def blocks(self, info: TensorInfo) -> np.ndarray:
        """Return the tensor's bytes as stored, `[rows, row_nbytes]` uint8, mapped and not copied."""
        data = np.memmap(self.path, dtype=np.uint8, mode="r", offset=info.offset, shape=(info.nbytes,))
        return data.reshape(math.prod(info.shape[:-1]), -1)


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} cannot be used: {what}. Download the file again and compare its size with the source.")


def _read_header(data: memoryview) -> tuple[dict[str, Any], list[TensorInfo]]:
    cursor = _Cursor(data)
    magic, version = bytes(cursor.take(4)), cursor.scalar("I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"magic {magic!r}, version {version}; expected b'GGUF' and 2 or 3")
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_fields)}
    heads = [_read_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not is_whole(alignment) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    return metadata, [
        TensorInfo(name, shape, kind, start + offset, nbytes) for name, shape, kind, offset, nbytes in heads
    ]


def _read_tensor(cursor: "_Cursor") -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
    name = cursor.string()
    shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
    kind = GGMLQuantizationType(cursor.scalar("I"))
    block_size, block_nbytes = GGML_QUANT_SIZES[kind]
    if math.prod(shape) == 0 or not shape or shape[-1] % block_size:
        raise ValueError(f"the tensor '{name}' is {list(shape)}, in blocks of {block_size}")
    return name, shape, kind, cursor.scalar("Q"), math.prod(shape) // block_size * block_nbytes


class _Cursor:
    """A reader that goes forward through the header; struct.error means that the bytes ran out."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def take(self, nbytes: int) -> memoryview:
        piece = self._data[self.position : self.position + nbytes]
        if len(piece) < nbytes:
            raise struct.error(f"{nbytes} bytes wanted at {self.position}, {len(piece)} left")
        self.position += nbytes
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return str(self.take(self.scalar("Q")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self.value(kind) for _ in range(count)]
        return np.frombuffer(self.take(count * struct.calcsize(_SCALARS[kind])), "<" + _SCALARS[kind]).tolist()

    def _strings(self, count: int) -> list[str]:
        """Read a vocabulary in one loop: by `string` one of 150,000 tokens takes three times as long."""
        data, position, length_at = self._data, self.position, struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            start = position + 8
            position = start + length_at(data, position)[0]
            if position > len(data):
                raise struct.error(f"a string ends at {position}, the file at {len(data)}")
            found.append(str(data[start:position], "utf-8"))
        self.position = position
        return found
