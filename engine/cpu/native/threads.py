"""The threads of the native kernels, and their part of the cores."""

import numpy as np

from kernels.cpu.native import NativeKernels
from process.core_board import own_seat


def start_threads(kernels: NativeKernels, num_threads: int) -> None:
    """Compute with so many threads from now on, with fewer while other workers of this machine compute."""
    if (seat := own_seat()) is not None:
        kernels.join_board(np.frombuffer(seat.page, np.uint8), seat.number, seat.num_cores)
    kernels.set_threads(num_threads)
