"""The rule by which a token drawn from a draft is kept: an answer's distribution stays as it is.

engine.draft_verification verifies drafts, place by place; this is its rule for tokens that were drawn.

Rejection sampling (Leviathan et al., ICML 2023; Chen et al. 2023): a token d that was drawn from the draft's
distribution q is kept with probability min(1, p(d) / q(d)), p being the model's; else one is drawn from max(p - q, 0),
scaled to 1.

A draft that guesses without drawing has q(d) = 1. Then d is kept with probability p(d), and else one is drawn of the
others by p. That is what comes of drawing x from p and keeping d if x = d: so for such drafts the engine draws as it
does without, with the same random number (seed, choice and position), and its answers are those without drafts, token
for token, greedy or not.
"""

import numpy as np


def accept_or_redraw(token_id: int, p_V: np.ndarray, q_V: np.ndarray, coin: float, point: float) -> tuple[bool, int]:
    """Return whether a token that was drawn from `q_V` is kept, and it or the one in its place.

    `p_V`, `q_V`: `[vocab]` probabilities of the model, after all that the request asks for, and of the draft. `coin`
    and `point`: in [0, 1), independent of each other and of the draft's own draw; the first decides, the second draws.
    Raises ValueError for a token that `q_V` never draws.
    """
    if q_V[token_id] <= 0.0:
        raise ValueError(f"token {token_id} can't have been drawn: its probability by the draft is {q_V[token_id]}")
    if coin * q_V[token_id] < p_V[token_id]:
        return True, token_id
    return False, _draw(residual(p_V, q_V), point)


def residual(p_V: np.ndarray, q_V: np.ndarray) -> np.ndarray:
    """Return the distribution of what stands in for a rejected token; `p_V` where the two are alike."""
    rest_V = np.maximum(p_V.astype(np.float64) - q_V, 0.0)
    total = rest_V.sum()
    return rest_V / total if total > 0.0 else p_V.astype(np.float64)


def _draw(weights_V: np.ndarray, point: float) -> int:
    """Inverse transform sampling, as the sampler does it; never a token of no weight."""
    cumulative = weights_V.cumsum()
    place = int(np.searchsorted(cumulative, point * cumulative[-1], side="right"))
    return min(place, int(np.flatnonzero(weights_V)[-1]))
