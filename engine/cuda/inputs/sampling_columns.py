"""Sampling parameters as the columns that the library's sampling operation reads."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from engine.sampling.philox import philox
from engine.sequence import Sequence

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@dataclass(frozen=True)
class SamplingColumns:
    """`[R]` each.

    A temperature of 0 is greedy, a top_k of 0 no limit. `positions`: where the drawn tokens belong.
    """

    temperatures: np.ndarray
    top_ks: np.ndarray
    top_ps: np.ndarray
    min_ps: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class DrawnRow:
    """A row of logits that a token of the sequence is drawn from, `place` tokens behind its next one."""

    sequence: Sequence
    place: int = 0


def columns(rows: SequenceOf[DrawnRow]) -> SamplingColumns:
    """Return those of the rows, of which those of one sequence lie side by side."""
    firsts = [place for place, row in enumerate(rows) if not row.place]
    counts = np.diff([*firsts, len(rows)])
    sequences = [rows[place].sequence for place in firsts]
    params = [sequence.sampling for sequence in sequences]
    return SamplingColumns(
        temperatures=np.array([0.0 if p.is_greedy else p.temperature for p in params], np.float32).repeat(counts),
        top_ks=np.array([max(p.top_k or 0, 0) for p in params], np.int32).repeat(counts),
        top_ps=np.array([p.top_p for p in params], np.float32).repeat(counts),
        min_ps=np.array([p.min_p for p in params], np.float32).repeat(counts),
        seeds=_keys(sequences).repeat(counts),
        positions=np.array([len(row.sequence.tokens) + row.place for row in rows], np.int32),
    )


def draw_keys(seeds: SequenceOf[int], choices: SequenceOf[int]) -> np.ndarray:
    """Return one int64 for each (seed, choice).

    The operation counts tokens and positions, so the choice goes into the key.
    """
    seed = np.array([value & (1 << 64) - 1 for value in seeds], np.uint64)
    choice = np.array(choices, np.uint64)
    zero = np.zeros_like(choice)
    low, high, _, _ = philox([choice & _LOW, choice >> _HALF, zero, zero], [seed & _LOW, seed >> _HALF])
    return (low | (high << _HALF)).view(np.int64)


def _keys(sequences: SequenceOf[Sequence]) -> np.ndarray:
    """Made once for a sequence: a tenth of a millisecond, which its first step would wait for.

    A greedy row needs none.
    """
    new = [s for s in sequences if s.draw_key is None and not s.sampling.is_greedy]
    if new:
        keys = draw_keys([s.sampling.seed for s in new], [s.sampling.choice for s in new])
        for sequence, key in zip(new, keys.tolist(), strict=True):
            sequence.draw_key = key
    return np.array([s.draw_key or 0 for s in sequences], np.int64)


def is_greedy(sequences: SequenceOf[Sequence]) -> bool:
    return all(sequence.sampling.is_greedy for sequence in sequences)
