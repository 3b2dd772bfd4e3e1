"""The loads that vLLM was measured under on two H200, what it reached, and how a server bore one of them as rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from bench.client import Answer
from bench.load import PERCENTILES, Lengths, Measured, Point, percentile, rows_of
from bench.result import Row

COLOCATED, PAIR = "vLLM 0.25.1, two replicas (quoted)", "vLLM 0.25.1, pair by NIXL (quoted)"
NUM_GPUS = 2
GAP_S = 0.010


@dataclass(frozen=True)
class Quoted:
    """Percentiles 50, 90 and 99 in ms, of another run on the same kind of host."""

    ttft: tuple[float, float, float]
    itl: tuple[float, float, float]


@dataclass(frozen=True)
class Load:
    """`ttft_s`: an answer is good if its first token came within it, and the others `GAP_S` apart in the mean."""

    name: str
    point: Point
    ttft_s: float
    colocated: Quoted
    pair: Quoted

    def shrunk(self, by: int) -> "Load":
        """Of a `by`th of the tokens and requests: to try a command out."""
        lengths = Lengths(*(max(2, num // by) for num in (self.point.lengths.num_in, self.point.lengths.num_out)))
        num_requests = max(2, self.point.num_requests // by)
        return replace(self, point=replace(self.point, lengths=lengths, num_requests=num_requests))


def _load(name: str, point: Point, ttft_s: float, *quoted: tuple[float, float, float]) -> Load:
    return Load(name, point, ttft_s, Quoted(*quoted[:2]), Quoted(*quoted[2:]))


SHORT, LONG = Lengths(1024, 256), Lengths(8192, 128)
LOADS = (
    _load("idle-1k", Point(Lengths(1024, 32), 1, None, 24), 0.2,
          (28.7, 39.6, 41.0), (3.47, 3.80, 4.11), (56.6, 64.4, 73.6), (3.41, 3.76, 4.22)),
    _load("idle-8k", Point(Lengths(8192, 32), 1, None, 16), 0.5,
          (147.0, 151.0, 151.0), (3.65, 4.05, 4.64), (303.0, 310.0, 592.0), (3.54, 3.87, 4.21)),
    _load("8k-4", Point(LONG, None, 4.0, 64), 0.5,
          (155.0, 172.0, 244.0), (3.83, 4.44, 27.6), (397.0, 582.0, 923.0), (4.37, 6.62, 115.0)),
    _load("8k-8", Point(LONG, None, 8.0, 128), 0.5,
          (173.0, 309.0, 459.0), (4.92, 9.83, 116.0), (1567.0, 2707.0, 3177.0), (11.9, 114.0, 123.0)),
    _load("1k-20", Point(SHORT, None, 20.0, 240), 0.2,
          (39.5, 64.6, 92.8), (4.16, 5.53, 38.3), (141.0, 185.0, 223.0), (5.04, 7.28, 34.7)),
    _load("1k-40", Point(SHORT, None, 40.0, 480), 0.2,
          (69.2, 104.0, 126.0), (5.31, 30.5, 41.5), (288.0, 477.0, 782.0), (11.5, 22.0, 87.7)),
)  # fmt: skip


def load_rows(system: str, load: Load, measured: Measured) -> list[Row]:
    """Beside what vLLM's two replicas reached, which is the better of its two."""
    own = {"system": system, "load": load.name}
    peers = {f"TTFT p{share}": value for share, value in zip(PERCENTILES, load.colocated.ttft, strict=True)}
    peers |= {f"ITL p{share}": value for share, value in zip(PERCENTILES, load.colocated.itl, strict=True)}
    rows = [
        replace(row, params=own | dict(row.params), peer=COLOCATED, peer_value=peers[row.name])
        if row.name in peers
        else replace(row, params=own | dict(row.params))
        for row in rows_of(measured, NUM_GPUS)
    ]
    return rows + [replace(row, params=own) for row in _more_rows(load, measured)] if measured.good else rows


def _more_rows(load: Load, measured: Measured) -> list[Row]:
    gaps_ms = [gap_s * 1e3 for answer in measured.good for gap_s in answer.gaps_s]
    tail = (
        [Row("ITL p99.9", percentile(gaps_ms, 99.9), "ms"), Row("ITL longest", max(gaps_ms), "ms")] if gaps_ms else []
    )
    num_good = sum(is_good(load, answer) for answer in measured.good)
    return [
        *tail,
        Row("within the objective", num_good / len(measured.answers), "of the requests"),
        Row("goodput", num_good / measured.wall_s, "requests/s"),
    ]


def is_good(load: Load, answer: Answer) -> bool:
    """Whether an answered request met its load's objective."""
    num_gaps = max(1, answer.num_tokens - 1)
    return answer.ttft_s <= load.ttft_s and (answer.total_s - answer.ttft_s) / num_gaps <= GAP_S


def quoted_rows(loads: Sequence[Load]) -> list[Row]:
    return list(chain.from_iterable(_quoted(load, name, of(load)) for load in loads for name, of in _QUOTED.items()))


_QUOTED: dict[str, Callable[[Load], Quoted]] = {COLOCATED: lambda load: load.colocated, PAIR: lambda load: load.pair}


def _quoted(load: Load, system: str, quoted: Quoted) -> list[Row]:
    params = {"system": system, "load": load.name}
    return [
        Row(f"{what} p{share}", value, "ms", params)
        for what, values in (("TTFT", quoted.ttft), ("ITL", quoted.itl))
        for share, value in zip(PERCENTILES, values, strict=True)
    ]
