"""The loads that two GPUs are measured under, and the rows of one load."""

from dataclasses import dataclass, replace

from bench.load.client import StreamResult
from bench.load.generator import Lengths, Measured, Point, percentile, rows_of
from bench.report.result import ResultRow

NUM_GPUS = 2
GAP_S = 0.010


@dataclass(frozen=True)
class Load:
    """One load with its objective.

    An answer is good if its first token came within `ttft_s`, and the others `GAP_S` apart in the mean.
    """

    name: str
    point: Point
    ttft_s: float

    def shrunk(self, by: int) -> "Load":
        """Return the load with a `by`th of its tokens and requests, to try a command out."""
        whole = self.point.lengths
        lengths = Lengths(num_in=max(2, whole.num_in // by), num_out=max(2, whole.num_out // by))
        num_requests = max(2, self.point.num_requests // by)
        return replace(self, point=replace(self.point, lengths=lengths, num_requests=num_requests))


SHORT, LONG = Lengths(1024, 256), Lengths(8192, 128)
LOADS = tuple(
    Load(name, point, ttft_s)
    for name, point, ttft_s in (
        ("idle-1k", Point(Lengths(1024, 32), 1, None, 24), 0.2),
        ("idle-8k", Point(Lengths(8192, 32), 1, None, 16), 0.5),
        ("8k-4", Point(LONG, None, 4.0, 64), 0.5),
        ("8k-8", Point(LONG, None, 8.0, 128), 0.5),
        ("1k-20", Point(SHORT, None, 20.0, 240), 0.2),
        ("1k-40", Point(SHORT, None, 40.0, 480), 0.2),
    )
)


def load_rows(system: str, load: Load, measured: Measured, num_gpus: int = NUM_GPUS) -> list[ResultRow]:
    """Return all rows of one load; `num_gpus` is 0 if it is not known."""
    own = {"system": system, "load": load.name}
    rows = [replace(row, params=own | dict(row.params)) for row in rows_of(measured, num_gpus)]
    return rows + [replace(row, params=own) for row in _more_rows(load, measured)] if measured.good else rows


def _more_rows(load: Load, measured: Measured) -> list[ResultRow]:
    gaps_ms = [gap_s * 1e3 for answer in measured.good for gap_s in answer.gaps_s]
    tail = (
        [ResultRow("ITL p99.9", percentile(gaps_ms, 99.9), "ms"), ResultRow("ITL longest", max(gaps_ms), "ms")]
        if gaps_ms
        else []
    )
    num_good = sum(is_good(load, answer) for answer in measured.good)
    num_events = sum(1 + len(answer.gaps_s) for answer in measured.good)
    return [
        *tail,
        ResultRow("tokens an event", sum(answer.num_tokens for answer in measured.good) / num_events, "tokens"),
        ResultRow("within the objective", num_good / len(measured.answers), "of the requests"),
        ResultRow("goodput", num_good / measured.wall_s, "requests/s"),
    ]


def is_good(load: Load, answer: StreamResult) -> bool:
    """Return whether an answered request met its load's objective."""
    num_gaps = max(1, answer.num_tokens - 1)
    return answer.ttft_s <= load.ttft_s and (answer.total_s - answer.ttft_s) / num_gaps <= GAP_S
