"""Random numbers as a pure function of what is drawn.

Philox 4x32-10 (Salmon et al., SC 2011), vectorised.
"""

import numpy as np

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniform(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`[N]` uint64 each -> `[N]` float64 in [0, 1): the same on any machine, in any batch, in any order."""
    words = philox(
        [positions & _LOW, positions >> _HALF, choices & _LOW, choices >> _HALF], [seeds & _LOW, seeds >> _HALF]
    )
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    return (bits & np.uint64((1 << 53) - 1)).astype(np.float64) * 2.0**-53


def philox(counter: list[np.ndarray], key: list[np.ndarray]) -> list[np.ndarray]:
    """Ten rounds over four 32-bit words kept in uint64 arrays."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (right >> _HALF) ^ x1 ^ k0, right & _LOW, (left >> _HALF) ^ x3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [x0, x1, x2, x3]
