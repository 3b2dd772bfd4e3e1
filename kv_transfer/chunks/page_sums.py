"""The checksums of pages, computed on the host as a GPU computes them.

See kernels.reference.move.checksums.
"""

import numpy as np

FACTOR = np.uint32(16777619)
_MOST_COLUMNS = 8192


def page_sums(pages: np.ndarray) -> np.ndarray:
    """Return uint32 `[pages]` of uint8 `[pages, page_nbytes]`.

    The 32-bit words of a page lie in columns, h = sum_i (2i + 1) * sum_j word[j, i] * FACTOR^(last - j), modulo 2^32.
    Every factor is odd, so one changed word always shows. Raises ValueError unless 4 divides `page_nbytes`.
    """
    num_pages, page_nbytes = pages.shape
    if page_nbytes % 4:
        raise ValueError(f"pages of {page_nbytes} bytes are no 32-bit words")
    num_words = page_nbytes // 4
    num_columns = min(_MOST_COLUMNS, num_words & -num_words)
    rows = np.ascontiguousarray(pages).view(np.uint32).reshape(num_pages, -1, num_columns)
    column = rows[:, 0].copy()
    for index in range(1, rows.shape[1]):
        column *= FACTOR
        column += rows[:, index]
    column *= 2 * np.arange(num_columns, dtype=np.uint32) + 1
    return column.sum(axis=1, dtype=np.uint32)
