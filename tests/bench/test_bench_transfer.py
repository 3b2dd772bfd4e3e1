"""What the transfer benchmark makes of several starts of its processes."""

from collections.abc import Iterator

import pytest

from bench.handoff import transports as transfer
from bench.handoff.transfer_case import CASES, SMOLLM2, TransferCase
from bench.report.result import ResultRow


def start(value: float, peer_value: float) -> list[ResultRow]:
    return [
        ResultRow("ucx rate", value, "GiB/s", {}, 4.0, "raw sockets", peer_value),
        ResultRow("ucx CPU", value, "s/GiB", {}),
    ]


def test_a_figure_is_the_median_of_its_starts_and_its_peer_is_compared_start_by_start(monkeypatch: pytest.MonkeyPatch):
    starts: Iterator[list[ResultRow]] = iter([start(2.0, 2.0), start(1.0, 3.0), start(4.0, 5.0)])
    monkeypatch.setattr(transfer, "bench_start", lambda case, num_rounds: next(starts))
    rows = {row.name: row for row in transfer.bench_case(CASES[0], 3, 5)}
    assert (rows["ucx rate"].value, rows["ucx rate"].limit, rows["ucx rate"].peer_value) == (2.0, 4.0, 3.0)
    assert rows["ucx slower than raw sockets, median start"].value == 1.25
    assert rows["ucx slower than raw sockets, worst start"].value == 3.0
    assert rows["ucx CPU"].value == 2.0 and rows["ucx CPU"].peer_value is None
    assert len(rows) == 4


def test_latencies_are_named_after_the_block_that_was_moved(monkeypatch: pytest.MonkeyPatch):
    pair = object.__new__(transfer.Pair)
    pair.name, pair._case, pair._grant_s = "shm", TransferCase(SMOLLM2, 4096), []
    monkeypatch.setattr(pair, "_move_one_block", lambda: pair._grant_s.append(2e-4) or 1e-3)
    rows = list(pair.latency_rows())
    assert [row.value for row in rows] == pytest.approx([200.0, 200.0, 1000.0, 1000.0])
    assert {row.params["tokens"] for row in rows} == {SMOLLM2.block_size}
