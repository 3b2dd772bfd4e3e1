"""A process that computes all the time and shares the cores with others of its kind: `FOLDER NUM_CORES`."""

import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from kernels.cpu.native import load_kernels
from process.core_board import take_seat


def main() -> None:
    """Compute until the process is killed."""
    folder, num_cores = Path(sys.argv[1]), int(sys.argv[2])
    kernels, seat = load_kernels(), take_seat(folder)
    kernels.join_board(np.frombuffer(seat.page, np.uint8), seat.number, num_cores)
    kernels.set_threads(num_cores)
    matrix = kernels.pack(GGMLQuantizationType.Q8_0, np.zeros((512, 34 * 8), np.uint8))
    rows = np.ones((8, 256), np.float32)
    print(seat.number, flush=True)
    while True:
        kernels.linear(matrix, rows)


if __name__ == "__main__":
    main()
