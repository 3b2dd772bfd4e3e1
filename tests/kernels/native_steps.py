"""Random decoders and batches for the native step, and the same decoder in numpy, in float64."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.cpu.native import KINDS, BatchStruct, LayerStruct, ModelStruct, NativeKernels, NativeMatrix
from tests.kernels.test_native import ROUNDED, dense, rounded, stored

VOCAB, POSITIONS, EPS = 64, 400, 1e-5
NO_BLOCK = 1 << 28
"""What a table has where a sequence has no block: a read of it leaves the process's memory."""
EXACT_TOLERANCE, HALF_KV_TOLERANCE, ROUNDED_TOLERANCE = 2e-4, 2e-3, 5e-2
"""The norm of a row's error, of its own norm. What is next to the middle of two codes may become either."""
Matrices = dict[str, "Weight"]


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    window: int
    has_head_norms: bool
    has_biases: bool
    is_exact: bool
    """Whether matrices are float32."""
    is_kv_exact: bool
    """Whether KV is float32."""


class Weight:
    """A matrix as the kernels have it, and its values."""

    def __init__(self, kernels: NativeKernels, rng: np.random.Generator, shape: Shape, n: int, k: int, biased: bool):
        fitting = [kind for kind in sorted(KINDS) if k % GGML_QUANT_SIZES[kind][0] == 0]
        kind = GGMLQuantizationType.F32 if shape.is_exact else fitting[rng.integers(len(fitting))]
        rows = stored(kind.name, n, k, int(rng.integers(1 << 30)))
        self.bias = rng.standard_normal(n, np.float32) * 0.1 if biased else None
        self.packed: NativeMatrix = kernels.pack(kind, rows, self.bias)
        self._values, self._rounds = dense(kind.name, rows).astype(np.float64), kind.name in ROUNDED

    @property
    def root_mean_square(self) -> float:
        return float(np.sqrt(np.mean(self._values**2))) or 1.0

    def times(self, x: np.ndarray) -> np.ndarray:
        seen = rounded(x.astype(np.float32)).astype(np.float64) if self._rounds else x
        return seen @ self._values.T + (0.0 if self.bias is None else self.bias)


@dataclass(frozen=True)
class RandomLayer:
    weights: Matrices
    attention_gain: np.ndarray
    mlp_gain: np.ndarray
    q_gain: np.ndarray | None
    k_gain: np.ndarray | None


@dataclass(frozen=True)
class RandomModel:
    shape: Shape
    embedding: np.ndarray
    rope: np.ndarray
    layers: list[RandomLayer]
    final_gain: np.ndarray


def random_shape(rng: np.random.Generator) -> Shape:
    num_kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    return Shape(
        hidden=int(rng.choice([32, 96, 128, 256, 512])),
        inner=int(rng.choice([32, 160, 256, 768])),
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=int(rng.choice([32, 64, 96, 128])),
        num_layers=int(rng.integers(1, 4)),
        window=int(rng.choice([0, 0, 1, 7, 33, 64])),
        has_head_norms=bool(rng.integers(2)),
        has_biases=bool(rng.integers(2)),
        is_exact=bool(rng.integers(2)),
        is_kv_exact=bool(rng.integers(2)),
    )


def random_model(kernels: NativeKernels, rng: np.random.Generator) -> RandomModel:
    shape = random_shape(rng)
    angles = np.arange(POSITIONS)[:, None] * 10000.0 ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    return RandomModel(
        shape,
        rng.standard_normal((VOCAB, shape.hidden), np.float32),
        np.stack([np.cos(angles), np.sin(angles)], 2).reshape(POSITIONS, -1).astype(np.float32),
        [_random_layer(kernels, rng, shape) for _ in range(shape.num_layers)],
        _gain(rng, shape.hidden),
    )


def _random_layer(kernels: NativeKernels, rng: np.random.Generator, shape: Shape) -> RandomLayer:
    hidden, inner, dim = shape.hidden, shape.inner, shape.head_dim
    q_width, kv_width = shape.num_heads * dim, shape.num_kv_heads * dim
    sizes = {"q": (q_width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden), "output": (hidden, q_width)}
    sizes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    biased = {"q", "k", "v", "output"} if shape.has_biases else set[str]()
    weights = {name: Weight(kernels, rng, shape, n, k, name in biased) for name, (n, k) in sizes.items()}
    # So that q and k, and gates, are of the order of 1: softmax of larger ones makes much of a rounded bit.
    largest = max(weights[name].root_mean_square for name in "qk")
    return RandomLayer(
        weights,
        _gain(rng, hidden) / np.float32(largest * np.sqrt(hidden)),
        _gain(rng, hidden) / np.float32(weights["gate"].root_mean_square * np.sqrt(hidden)),
        _gain(rng, dim) if shape.has_head_norms else None,
        _gain(rng, dim) if shape.has_head_norms else None,
    )


def _gain(rng: np.random.Generator, width: int) -> np.ndarray:
    return rng.uniform(0.5, 1.5, width).astype(np.float32)


def reference(model: RandomModel, tokens: np.ndarray) -> np.ndarray:
    """Return the hidden rows of one sequence, `[tokens, hidden]`, after the final norm."""
    shape, x = model.shape, model.embedding[tokens].astype(np.float64)
    turns = model.rope[: len(tokens)]
    for layer in model.layers:
        normed = _norm(x, layer.attention_gain)
        q, k, v = (_heads(layer.weights[name].times(normed), shape) for name in "qkv")
        q, k = (_rotated(_head_norm(part, gain), turns) for part, gain in ((q, layer.q_gain), (k, layer.k_gain)))
        mixed = _attention(q, _kept(k, shape), _kept(v, shape), shape)
        x = x + layer.weights["output"].times(mixed)
        normed = _norm(x, layer.mlp_gain)
        gates = layer.weights["gate"].times(normed)
        x = x + layer.weights["down"].times(gates / (1 + np.exp(-gates)) * layer.weights["up"].times(normed))
    return _norm(x, model.final_gain)


def _norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS) * gain


def _head_norm(heads: np.ndarray, gain: np.ndarray | None) -> np.ndarray:
    return heads if gain is None else _norm(heads, gain)


def _heads(x: np.ndarray, shape: Shape) -> np.ndarray:
    return x.reshape(len(x), -1, shape.head_dim)


def _rotated(heads: np.ndarray, turns: np.ndarray) -> np.ndarray:
    cosines, sines = turns[:, None, 0::2], turns[:, None, 1::2]
    a, b = heads[..., 0::2], heads[..., 1::2]
    return np.stack([a * cosines - b * sines, a * sines + b * cosines], -1).reshape(heads.shape)


def _kept(heads: np.ndarray, shape: Shape) -> np.ndarray:
    """Return what the cache makes of K or V."""
    if shape.is_kv_exact:
        return heads
    bits = heads.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, shape: Shape) -> np.ndarray:
    group = shape.num_heads // shape.num_kv_heads
    k, v = (np.repeat(part, group, 1) for part in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(shape.head_dim)
    distance = np.arange(len(q))[:, None] - np.arange(len(k))
    scores[:, (distance < 0) | (bool(shape.window) & (distance >= shape.window))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), -1)


class PagedRun:
    """The native step over the sequences of a case, in pages of its own that begin as NaN."""

    def __init__(
        self, kernels: NativeKernels, rng: np.random.Generator, model: RandomModel, lengths: list[int]
    ) -> None:
        self._kernels, self._rng, self._model, shape = kernels, rng, model, model.shape
        self._block_size = int(rng.choice([16, 32, 64]))
        counts = [-(-length // self._block_size) for length in lengths]
        blocks = rng.permutation(sum(counts) + 3).astype(np.int32)
        self._tables = np.full((len(lengths), max(counts) + 1), NO_BLOCK, np.int32)
        for index, count in enumerate(counts):
            self._tables[index, :count], blocks = blocks[:count], blocks[count:]
        width = 4 if shape.is_kv_exact else 2
        page = (sum(counts) + 3) * shape.num_kv_heads * self._block_size * shape.head_dim * width
        self._pages = [np.full(page, 0xFF, np.uint8) for _ in range(2 * shape.num_layers)]
        self._struct, self._layers = self._structs()

    def _structs(self) -> tuple[ModelStruct, ctypes.Array[LayerStruct]]:
        model, shape = self._model, self._model.shape
        layers = (LayerStruct * shape.num_layers)()
        for index, (struct, layer) in enumerate(zip(layers, model.layers, strict=True)):
            for name, weight in layer.weights.items():
                setattr(struct, name, weight.packed.struct)
            for name in ("attention_gain", "mlp_gain", "q_gain", "k_gain"):
                gain = getattr(layer, name)
                setattr(struct, name, None if gain is None else gain.ctypes.data)
            struct.keys, struct.values = (pages.ctypes.data for pages in self._pages[2 * index : 2 * index + 2])
            struct.window = shape.window
        return ModelStruct(
            hidden_size=shape.hidden,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            inner_size=shape.inner,
            num_layers=shape.num_layers,
            block_size=self._block_size,
            is_kv_float32=int(shape.is_kv_exact),
            embedding_kind=int(GGMLQuantizationType.F32),
            norm_eps=EPS,
            embedding_row_nbytes=4 * shape.hidden,
            embedding=model.embedding.ctypes.data,
            rope=model.rope.ctypes.data,
            layers=ctypes.cast(layers, ctypes.POINTER(LayerStruct)),
            final_gain=model.final_gain.ctypes.data,
        ), layers

    def compute(self, sequences: list[np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
        """Go through sequences in random batches; return the hidden rows by sequence and position."""
        found: dict[tuple[int, int], np.ndarray] = {}
        for rows in self._batches([len(tokens) for tokens in sequences]):
            tokens = np.array([sequences[owner][position] for owner, position in rows], np.int32)
            owners, positions = (np.array(part, np.int32) for part in zip(*rows, strict=True))
            wanted = np.flatnonzero(self._rng.random(len(rows)) < self._rng.choice([0.1, 0.7, 1.0])).astype(np.int32)
            hidden = np.empty((len(wanted), self._model.shape.hidden), np.float32)
            places = {"tokens": tokens, "positions": positions, "sequences": owners, "tables": self._tables}
            places |= {"wanted": wanted, "hidden": hidden}
            pointers = {name: array.ctypes.data for name, array in places.items()}
            counts = {"num_rows": len(rows), "num_wanted": len(wanted), "table_stride": self._tables.shape[1]}
            self._kernels.forward(self._struct, BatchStruct(**counts, **pointers))
            found |= {rows[row]: values for row, values in zip(wanted, hidden, strict=True)}
        return found

    def _batches(self, lengths: list[int]) -> Iterator[list[tuple[int, int]]]:
        """Yield batches of (sequence, position): of each sequence its next tokens, or none."""
        nexts = [0] * len(lengths)
        while nexts != lengths:
            rows: list[tuple[int, int]] = []
            for owner in self._rng.permutation(len(lengths)).tolist():
                count = int(self._rng.choice([0, 1, 1, 3, 16, 50, 200]))
                last = min(nexts[owner] + count, lengths[owner])
                rows += [(owner, position) for position in range(nexts[owner], last)]
                nexts[owner] = last
            if rows:
                yield rows


def tolerance_of(shape: Shape) -> float:
    if not shape.is_exact:
        return ROUNDED_TOLERANCE
    return EXACT_TOLERANCE if shape.is_kv_exact else HALF_KV_TOLERANCE


def check_step(kernels: NativeKernels, rng: np.random.Generator) -> None:
    """Compare a random decoder's rows with the reference, and with themselves in other batches, pages and threads."""
    model = random_model(kernels, rng)
    lengths = [int(rng.choice([1, 2, 31, 32, 33, int(rng.integers(1, 150))])) for _ in range(rng.integers(1, 6))]
    sequences = [rng.integers(0, VOCAB, length) for length in lengths]
    found = PagedRun(kernels, rng, model, lengths).compute(sequences)
    words = f"{model.shape}, {lengths} tokens"
    tolerance = tolerance_of(model.shape)
    exact = [reference(model, tokens) for tokens in sequences]
    for (owner, position), row in found.items():
        expected = exact[owner][position]
        error = np.linalg.norm(row - expected) / np.linalg.norm(expected)
        assert error <= tolerance, f"{words}: token {position} of sequence {owner} is wrong by {error:.3g}"
    kernels.set_threads(int(rng.integers(1, 6)))
    again = PagedRun(kernels, rng, model, lengths).compute(sequences)
    for place in found.keys() & again.keys():
        assert np.array_equal(found[place], again[place]), f"{words}: {place} has other bits in another batch"
