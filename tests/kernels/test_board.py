"""The cores that a step takes while others compute: by what stands on a board, and between processes that compute."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from kernels.cpu.native import BOARD_NBYTES, NativeKernels, load_kernels
from process.core_board import NUM_SEATS, PAGE_NBYTES, take_seat

SEAT = np.dtype(
    {"names": ["ends_ns", "wanted", "taken"], "formats": ["u8", "u4", "u4"], "offsets": [0, 8, 12], "itemsize": 64}
)
LATER_NS, PAST_NS, NEVER_NS = 40_000_000, -1, 10**12
DEADLINE_S = 60.0
Claim = tuple[int, int, int]
"""What another says: its seat, in how many nanoseconds its claim ends, and how many threads it wants."""


class Board:
    """A page, and what stands on it."""

    def __init__(self, page: np.ndarray) -> None:
        self.page = page
        self.seats = page[64:].view(SEAT)

    def wait_for(self, *taken: int) -> None:
        """Wait until the processes of the first seats take so many cores each."""
        deadline = time.monotonic() + DEADLINE_S
        while (found := tuple(self.seats["taken"][: len(taken)].tolist())) != taken:
            assert time.monotonic() < deadline, f"{found} cores are taken"
            time.sleep(0.001)


@pytest.fixture
def kernels() -> Iterator[NativeKernels]:
    yield (library := load_kernels())
    library.join_board(np.zeros(BOARD_NBYTES, np.uint8), 0, 2)  # where nobody else is
    library.set_threads(2)


@pytest.mark.parametrize(
    ("seat", "others", "cores"),
    [
        (0, [], 8),
        (0, [(1, LATER_NS, 8)], 4),
        (0, [(1, PAST_NS, 8)], 8),
        (0, [(1, NEVER_NS, 8)], 8),
        (0, [(1, LATER_NS, 8), (2, LATER_NS, 8)], 3),
        (2, [(0, LATER_NS, 8), (1, LATER_NS, 8)], 2),
        (0, [(1, LATER_NS, 1)], 7),
        (1, [(0, LATER_NS, 8), (2, LATER_NS, 1)], 3),
        (0, [(2, LATER_NS, 8), (1, LATER_NS, 1)], 4),
        (62, [(at, LATER_NS, 8) for at in range(20)], 1),
    ],
)
def test_a_step_takes_its_part(
    kernels: NativeKernels, seat: int, others: list[tuple[int, int, int]], cores: int
) -> None:
    """There are 8 cores: an even part is its own, or more where others want less or have ended."""
    board = Board(np.zeros(BOARD_NBYTES, np.uint8))
    board.page[:4].view(np.uint32)[0] = NUM_SEATS
    kernels.join_board(board.page, seat, 8)
    matrix = kernels.pack(GGMLQuantizationType.Q8_0, np.zeros((32, 34), np.uint8))
    rows = np.ones((2, 32), np.float32)
    kernels.set_threads(8)

    def compute() -> None:
        for number, left_ns, wanted in others:
            board.seats[["ends_ns", "wanted"]][number] = time.monotonic_ns() + left_ns, wanted
        kernels.linear(matrix, rows)

    board.seats["taken"][seat] = 0
    deadline = time.monotonic() + DEADLINE_S
    while compute() or board.seats["taken"][seat] != cores:
        assert time.monotonic() < deadline, f"it takes {board.seats['taken'][seat]} cores"


def test_a_product_is_the_same_with_any_part(kernels: NativeKernels) -> None:
    board = Board(np.zeros(BOARD_NBYTES, np.uint8))
    kernels.join_board(board.page, 0, 4)
    kernels.set_threads(4)
    rng = np.random.default_rng(0)
    matrix = kernels.pack(GGMLQuantizationType.F16, rng.standard_normal((200, 96)).astype(np.float16).view(np.uint8))
    rows = rng.standard_normal((40, 96), np.float32)
    alone, board.page[:4] = kernels.linear(matrix, rows), [2, 0, 0, 0]
    for turn in range(200):
        board.seats[["ends_ns", "wanted"]][1] = time.monotonic_ns() + (LATER_NS if turn % 3 else PAST_NS), 4
        np.testing.assert_array_equal(kernels.linear(matrix, rows), alone)


def test_processes_share_the_cores_while_both_compute(tmp_path: Path) -> None:
    """A third one only looks. Each takes all while it is alone, also after the other was killed."""
    board = Board(np.frombuffer(take_seat(tmp_path).page, np.uint8))
    with computing(tmp_path) as first:
        board.wait_for(0, 2)
        with computing(tmp_path) as second:
            assert (first, second) == (1, 2)
            board.wait_for(0, 1, 1)
        board.wait_for(0, 2)


@contextmanager
def computing(folder: Path) -> Iterator[int]:
    """Run a process that computes on two cores, killed at the end; yield its seat."""
    command = [sys.executable, "-m", "tests.kernels.board_worker", str(folder), "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def test_the_page_is_that_of_the_kernels() -> None:
    assert PAGE_NBYTES == BOARD_NBYTES == 64 * (1 + NUM_SEATS)
