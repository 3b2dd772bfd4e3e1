"""The rows of a batch that go past the last layer's K and V.

Of each piece the last ones, from the first on whose logits are wanted. Nobody reads what that layer's attention and MLP
would make of the others. On a GPU these are rows that are scored; those that sample go there in
engine.cuda.graphs.last_layer_graphs.

A piece's rows follow each other in the batch; N pieces, M rows.
"""

import numpy as np


def tails(counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """How many last rows of each piece, `[N]`.

    `counts` `[N]` rows of the pieces; `wanted`: rows of the batch.
    """
    ends = np.cumsum(counts)
    firsts = ends.copy()
    np.minimum.at(firsts, np.searchsorted(ends, wanted, side="right"), wanted)
    return ends - firsts


def tail_rows(counts: np.ndarray, lasts: np.ndarray) -> np.ndarray:
    """The rows of the batch that are the `lasts` `[N]` last ones of each piece, in order."""
    firsts = np.cumsum(counts) - lasts
    return np.repeat(firsts - (np.cumsum(lasts) - lasts), lasts) + np.arange(lasts.sum())
