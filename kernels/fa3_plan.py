"""The plan that FlashInfer's fa3 reads.

Which tiles of queries a multiprocessor attends for, and in which order.

FlashInfer's own deals tiles out head by head, so that the last ones may be long. Here the longest come first, of as
many heads at a time as the L2 cache has keys for; what a tile gives does not depend on who computes it, or when. Numpy
alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np

from kernels.specs import AttnSpec

_L2_NBYTES = 8 << 20  # of an H200's 50 MiB, for keys and values
_MANY_TILES, _ALIKE = 6, 1.5  # for a multiprocessor; how much longer one of two alike is
_EVEN = 1.04  # times the mean
_ALIGNMENT = 4  # numbers


@dataclass(frozen=True)
class Works:
    """The tiles of queries of heads, by multiprocessor, `[W]` each.

    Those of m are from `starts[m]` on. `tile`: its number in its sequence; `kv_start`: its sequence's first place among
    page numbers; `cost` in any unit.
    """

    tile: np.ndarray
    q_start: np.ndarray
    kv_start: np.ndarray
    q_len: np.ndarray
    kv_len: np.ndarray
    head: np.ndarray
    sequence: np.ndarray
    cost: np.ndarray
    starts: np.ndarray

    def packed(self) -> tuple[np.ndarray, list[int]]:
        """int32 numbers, and what fa3 takes as its plan: where columns begin in them, in bytes.

        That heads differ.
        """
        columns = [
            self.tile, self.q_start, self.kv_start, self.q_len, self.kv_len, self.head, self.starts, self.sequence
        ]  # fmt: skip
        sizes = [-(-len(column) // _ALIGNMENT) * _ALIGNMENT for column in columns]
        begins = np.cumsum([0, *sizes]).tolist()
        numbers = np.zeros(begins[-1], np.int32)
        for column, begin in zip(columns, begins, strict=False):
            numbers[begin : begin + len(column)] = column
        return numbers, [*(4 * begin for begin in begins[:-1]), 0]


def works(spec: AttnSpec, new: Sequence[int], total: Sequence[int], width: int, num_sms: int) -> Works:
    """`new` tokens of each sequence behind `total - new`, causal; page numbers are `width` a sequence."""
    rows = 192 if spec.head_dim == 64 else 128  # of a tile, as fa3 was compiled
    q_len, kv_len = np.array(new), np.array(total)
    counts = -(-q_len // rows)
    sequence = np.repeat(np.arange(len(new)), counts)
    tile = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    seen = (kv_len - q_len)[sequence] + np.minimum((tile + 1) * rows, q_len[sequence])
    if spec.window:
        seen = np.minimum(seen, spec.window + rows)
    cost = 2 * rows + seen  # as FlashInfer has it: a tile's own work counts as 256 keys
    place, head = (grid.reshape(-1) for grid in np.meshgrid(np.arange(len(cost)), np.arange(spec.q_heads)))
    group = head * _groups(spec, int(kv_len.sum())) // spec.q_heads
    # Of few tiles the long ones come first of all heads: behind others, one would end late.
    is_few = len(head) < _MANY_TILES * num_sms
    size = np.log(cost.max() / cost) // np.log(_ALIKE) if is_few else np.zeros(len(cost))
    order = np.lexsort((head, -cost[place], group, size[place]))
    place, head = place[order], head[order]
    sm = _dealt(cost[place], num_sms)
    by_sm = np.argsort(sm, kind="stable")
    place, head = place[by_sm], head[by_sm]
    owner = sequence[place]
    return Works(
        tile=tile[place],
        q_start=(np.cumsum(q_len) - q_len)[owner],
        kv_start=owner * width,
        q_len=q_len[owner],
        kv_len=kv_len[owner],
        head=head,
        sequence=owner,
        cost=cost[place],
        starts=np.concatenate([[0], np.cumsum(np.bincount(sm, minlength=num_sms))]),
    )


def _groups(spec: AttnSpec, num_keys: int) -> int:
    """Return the number of groups of heads whose tiles are dealt out together, a power of two."""
    nbytes, groups = 2 * num_keys * spec.kv_heads * spec.head_dim * (1 if spec.kv == "e4m3" else 2), 1
    while nbytes > groups * _L2_NBYTES and spec.kv_heads % (2 * groups) == 0:
        groups *= 2
    return groups


def _dealt(cost: np.ndarray, num_sms: int) -> np.ndarray:
    """Return which multiprocessor takes which tile.

    Dealt out in rounds, every other one backwards, or, where that leaves somebody much more than the others, each to
    the one with the least so far, which takes 0.15 us each.
    """
    turn, place = np.divmod(np.arange(len(cost)), num_sms)
    sm = np.where(turn % 2 == 0, place, num_sms - 1 - place)
    if len(cost) <= num_sms or np.bincount(sm, cost).max() * num_sms < _EVEN * cost.sum():
        return sm
    taken = list(range(num_sms))  # cost so far, and whose it is in the last digits: equal ones in order
    sms = []
    for more in (cost * num_sms).tolist():
        least = taken[0]
        sms.append(least % num_sms)
        heapreplace(taken, least + more)
    return np.array(sms)
