"""The native kernels from Python: matrices in GGUF's formats as stored, and whole steps of a decoder.

Called by ctypes, which lets go of the GIL. Sources: kernels/csrc/cpu. Nothing here knows torch: arrays are numpy's.
"""

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.cpu.build import DEFAULT_CACHE, Say, build

LEVELS = ("plain", "avx2", "avx512", "amx")
"""The instruction sets, by the numbers that the library has for them. `amx` is `avx512` with tiles where they pay."""
_NAMES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
KINDS = frozenset(GGMLQuantizationType[name] for name in _NAMES)
"""The formats that the kernels multiply."""
NUMERICS = 2
"""The version of what the kernels compute from the same numbers, which is part of a KV cache's layout.

Raised by hand with each change of rounding, of an order of sums or of a function in kernels/csrc/cpu that changes bits.
"""
LEVEL_VARIABLE = "TANDEM_CPU_KERNELS"
ALIGNMENT = 64
"""The bytes of a cache line, at which packed arrays begin."""
BOARD_NBYTES = 4096
"""The size of the page that board.h has: a line about it, and one for each process."""
_STRIP = 16
"""The rows of a strip, as formats.h has it."""


class MatrixStruct(Structure):
    """A matrix as api.h has it."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "n", "k", "reserved")),
        *((name, c_void_p) for name in ("codes", "scales", "bias")),
    )


class LayerStruct(Structure):
    """A layer as api.h has it."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("q", "k", "v", "output", "gate", "up", "down")),
        *((name, c_void_p) for name in ("attention_gain", "mlp_gain", "q_gain", "k_gain", "keys", "values")),
        ("window", c_int32),
        ("reserved", c_int32),
    )


class ModelStruct(Structure):
    """A model as api.h has it."""

    _fields_ = (
        *((name, c_int32) for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "inner_size")),
        *((name, c_int32) for name in ("num_layers", "block_size", "is_kv_float32", "embedding_kind")),
        ("norm_eps", c_float),
        ("embedding_row_nbytes", c_int64),
        ("embedding", c_void_p),
        ("rope", c_void_p),
        ("layers", POINTER(LayerStruct)),
        ("final_gain", c_void_p),
        ("head", MatrixStruct),
        ("feature_gain", c_void_p),
        ("adds_normed", c_int32),
        ("reserved", c_int32),
    )


class BatchStruct(Structure):
    """A batch as api.h has it."""

    _fields_ = (
        *((name, c_int32) for name in ("num_rows", "num_wanted", "table_stride", "num_aux")),
        *((name, c_void_p) for name in ("tokens", "positions", "sequences", "tables", "wanted", "hidden")),
        *((name, c_void_p) for name in ("aux_layers", "aux", "features", "seen_from", "ends")),
    )


@dataclass(frozen=True)
class NativeMatrix:
    """A packed matrix `[n, k]`, which owns the memory that its struct points to."""

    struct: MatrixStruct
    arrays: tuple[np.ndarray, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.struct.n, self.struct.k

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class PackedDiffers(ValueError):
    """What is packed already is not what the matrix gives; the message names its format and shape."""


class StripMemory(Protocol):
    """Memory for packed matrices, taken piece by piece. `is_packed`: whether they lie in it already."""

    is_packed: bool

    def take(self, nbytes: int) -> np.ndarray:
        """Return the next piece, `[nbytes]` uint8, at a multiple of ALIGNMENT."""
        ...


class PrivateMemory:
    """Memory of this process alone."""

    is_packed = False

    def take(self, nbytes: int) -> np.ndarray:
        return aligned(nbytes)


class NativeKernels:
    """The library's functions over numpy arrays."""

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        self._packed_nbytes = _declared(library.tandem_packed_nbytes, c_int32, c_int64, c_int64, c_void_p, c_void_p)
        self._pack = _declared(library.tandem_pack, POINTER(MatrixStruct), c_void_p)
        self._widen = _declared(library.tandem_widen, c_int32, c_void_p, c_int64, c_void_p)
        self._linear = _declared(library.tandem_linear, POINTER(MatrixStruct), c_void_p, c_int64, c_void_p)
        self._forward = _declared(library.tandem_forward, POINTER(ModelStruct), POINTER(BatchStruct))
        self._set_threads = _declared(library.tandem_set_threads, c_int)
        self._join_board = _declared(library.tandem_join_board, c_void_p, c_int, c_int)
        self._set_level = _declared(library.tandem_set_level, c_int, result=c_int)
        self._board: np.ndarray | None = None
        self.best_level = LEVELS[_declared(library.tandem_best_level, result=c_int)()]

    def set_level(self, name: str) -> str:
        """Take an instruction set, or the best below it that the CPU has. Packed matrices serve all of them."""
        return LEVELS[self._set_level(LEVELS.index(name))]

    def set_threads(self, count: int) -> None:
        """Share work out among so many threads of this process, the caller among them."""
        self._set_threads(count)

    def join_board(self, board: np.ndarray, seat: int, num_cores: int) -> None:
        """Share `num_cores` with the processes that have the same board.

        Steps take fewer threads while others compute. `board`: a page that they share, `[BOARD_NBYTES]` uint8. `seat`:
        the line of this process there, and of no other.
        """
        if board.nbytes != BOARD_NBYTES or not 0 <= seat < BOARD_NBYTES // ALIGNMENT - 1:
            raise ValueError(f"a board has {BOARD_NBYTES} bytes, of which a seat takes {ALIGNMENT}")
        self._board = board
        self._join_board(board.ctypes.data, seat, num_cores)

    def packed_nbytes(self, kind: int, n: int, k: int) -> tuple[int, int]:
        """Return what a packed matrix `[n, k]` takes: codes and scales, in bytes."""
        sizes = np.zeros(2, np.int64)
        self._packed_nbytes(kind, n, k, sizes.ctypes.data, sizes.ctypes.data + 8)
        return int(sizes[0]), int(sizes[1])

    def pack(
        self, kind: int, rows: np.ndarray, bias: np.ndarray | None = None, memory: StripMemory | None = None
    ) -> NativeMatrix:
        """Pack a matrix of a file, or take it as it is packed in `memory`.

        `rows` `[n, row_nbytes]` uint8, blocks as GGUF has them; float32 `bias` `[n]`. Raises ValueError for a format
        that there are no kernels for, and for rows that are no whole blocks; PackedDiffers if the first strip in
        `memory` is that of another matrix.
        """
        memory = PrivateMemory() if memory is None else memory
        kind = GGMLQuantizationType(kind)
        if kind not in KINDS:
            raise ValueError(f"the format {kind.name} has no native kernel")
        block, block_nbytes = GGML_QUANT_SIZES[kind]
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] % block_nbytes:
            raise ValueError(
                f"rows are {rows.dtype} {list(rows.shape)}; {kind.name} has blocks of {block_nbytes} bytes"
            )
        n, k = len(rows), rows.shape[1] // block_nbytes * block
        if k % 32:
            raise ValueError(f"rows have {k} columns; native kernels take multiples of 32")
        codes, scales = (memory.take(nbytes) for nbytes in self.packed_nbytes(kind, n, k))
        rows = np.ascontiguousarray(rows)
        struct = MatrixStruct(kind, n, k, 0, codes.ctypes.data, scales.ctypes.data, None)
        held = [codes, scales]
        if bias is not None:
            held.append(np.ascontiguousarray(bias, np.float32))
            struct.bias = held[-1].ctypes.data
        if not memory.is_packed:
            self._pack(struct, rows.ctypes.data)
        elif not self._begin_alike(kind, rows, codes, scales):
            raise PackedDiffers(f"the strips of a {kind.name} matrix [{n}, {k}] are not its own")
        return NativeMatrix(struct, tuple(held))

    def _begin_alike(self, kind: int, rows: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> bool:
        """Whether the first strip is that of the rows."""
        first = self.pack(kind, rows[:_STRIP]).arrays
        pairs = zip(first, (codes, scales), strict=True)
        return all(np.array_equal(own, packed[: len(own)]) for own, packed in pairs)

    def widen(self, kind: int, rows: np.ndarray) -> np.ndarray:
        """Return the float32 values `[n, k]` of blocks `[n, row_nbytes]`."""
        block, block_nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        rows = np.ascontiguousarray(rows)
        values = np.empty((len(rows), rows.shape[1] // block_nbytes * block), np.float32)
        for row, out in zip(rows, values, strict=True):
            self._widen(kind, row.ctypes.data, len(out), out.ctypes.data)
        return values

    def linear(self, matrix: NativeMatrix, x: np.ndarray) -> np.ndarray:
        """Return x `[M, k]` float32 times the matrix, plus its bias, `[M, n]`."""
        n, k = matrix.shape
        if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != k or not x.flags.c_contiguous:
            raise ValueError(f"rows are {x.dtype} {list(x.shape)}; the matrix takes contiguous float32 of {k} columns")
        y = np.empty((len(x), n), np.float32)
        self._linear(matrix.struct, x.ctypes.data, len(x), y.ctypes.data)
        return y

    def forward(self, model: ModelStruct, batch: BatchStruct) -> None:
        """Compute a step.

        K and V of all rows are written; the hidden rows that are wanted go to `batch.hidden`.
        """
        self._forward(model, batch)


def _declared(function, *arguments, result=None):
    function.argtypes, function.restype = arguments, result
    return function


def aligned(nbytes: int) -> np.ndarray:
    """Return uninitialised bytes that begin on a cache line."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def load_kernels(cache_dir: Path = DEFAULT_CACHE, say: Say = lambda line: None) -> NativeKernels:
    """Return the library, built if need be. Raises BuildError, and OSError for one that does not load."""
    return _open(build(cache_dir, say))


@cache
def _open(file: Path) -> NativeKernels:
    kernels = NativeKernels(file)
    if wanted := os.environ.get(LEVEL_VARIABLE):
        if wanted not in LEVELS:
            raise OSError(f"{LEVEL_VARIABLE} is '{wanted}'; it may be {', '.join(LEVELS)}")
        kernels.set_level(wanted)
    return kernels


def unsupported(kinds: Sequence[int]) -> list[str]:
    """Return the names of the formats that have no native kernel."""
    return sorted({GGMLQuantizationType(kind).name for kind in kinds} - {kind.name for kind in KINDS})
