"""The quantizer of the lossy levels: equal steps, whose symbols an entropy coder then makes short.

A key is measured from its channel's mean over the run, since a few channels of keys lie far from zero; a value from
zero. One head of one run has one step: a share of its standard deviation, and never so narrow that a symbol would not
fit in 8 bits. So no value is clipped, and none is off by more than half a step before it is rounded to its own format.
Steps of one width followed by an entropy coder need fewer bits for an error than levels fitted to the distribution do
(CacheGen, arXiv 2310.07240, codes so; KIVI, arXiv 2402.02750, has why keys go by channel).
"""

from dataclasses import dataclass

import numpy as np

from kv_transfer.codecs.level import CodecLevel
from kv_transfer.codecs.page_format import PageFormat, PageRun

MAX_SYMBOL = 127
_STEP, _MEAN = np.dtype("<f4"), np.dtype("<f2")


@dataclass(frozen=True, slots=True)
class QuantizedRun:
    """A quantized run.

    `symbols`: int8 `[pages, heads, block, dim]`; `steps`: `[heads]`; `means`: `[heads, dim]`, of keys only.
    """

    symbols: np.ndarray
    steps: np.ndarray
    means: np.ndarray | None

    def parameters(self) -> bytes:
        return self.steps.tobytes() + (b"" if self.means is None else self.means.tobytes())

    def values(self) -> np.ndarray:
        """Return what the symbols stand for, float32, flat.

        One product and one sum of float32 each, so that every machine finds the same bits.
        """
        values = self.symbols.astype(np.float32)
        values *= self.steps[:, None, None]
        if self.means is not None:
            values += self.means.astype(np.float32)[:, None]
        return values.reshape(-1)


def parameters_nbytes(run: PageRun, format_: PageFormat) -> int:
    """Return the bytes of the parameters of a quantized run."""
    means = format_.head_dim * _MEAN.itemsize if run.is_key else 0
    return format_.num_kv_heads * (_STEP.itemsize + means)


def quantize(values: np.ndarray, run: PageRun, level: CodecLevel, format_: PageFormat) -> QuantizedRun | None:
    """Return the run quantized; None if it has values that no step fits.

    These are NaN, infinite ones, and keys beyond float16. `values`: float32, those of the run's pages, flat.
    """
    pages = values.reshape(-1, format_.num_kv_heads, format_.block_size, format_.head_dim)
    means, centred = None, pages
    with np.errstate(over="ignore", invalid="ignore"):
        if run.is_key:
            means = pages.mean(axis=(0, 2)).astype(_MEAN)
            centred = pages - means.astype(np.float32)[:, None]
        share = level.key_step if run.is_key else level.value_step
        steps = _steps(centred, share or 0.0)
        if not np.isfinite(steps).all() or (means is not None and not np.isfinite(means).all()):
            return None
    symbols = np.rint(centred * (np.float32(1) / steps)[:, None, None])
    return QuantizedRun(symbols.astype(np.int8), steps, means)


def read_quantized(symbols: np.ndarray, parameters: np.ndarray, run: PageRun, format_: PageFormat) -> QuantizedRun:
    """Return a run from its symbols, flat, and the `parameters_nbytes` bytes of its parameters."""
    num_heads, dim = format_.num_kv_heads, format_.head_dim
    end = num_heads * _STEP.itemsize
    steps = np.frombuffer(parameters[:end].tobytes(), dtype=_STEP)
    means = np.frombuffer(parameters[end:].tobytes(), dtype=_MEAN).reshape(num_heads, dim) if run.is_key else None
    return QuantizedRun(symbols.reshape(-1, num_heads, format_.block_size, dim), steps, means)


def _steps(centred: np.ndarray, share: float) -> np.ndarray:
    """Return the step of each head, float32; not finite or zero where there is none."""
    most = np.maximum(centred.max(axis=(0, 2, 3)), -centred.min(axis=(0, 2, 3)))
    steps = np.maximum(most / np.float32(MAX_SYMBOL), np.float32(share) * centred.std(axis=(0, 2, 3)))
    # A head of zeros gets a step too, and one so narrow that its inverse would be infinite a wider one.
    return np.maximum(steps, np.float32(1e-30)).astype(_STEP)
