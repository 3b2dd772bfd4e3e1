"""Acceptance: what is drawn has the model's distribution, whatever a draft guesses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling import host_sampler
from engine.sampling.host_sampler import Sampler
from engine.sampling.philox import uniform
from engine.sampling.token_masks import NO_MASKS
from engine.speculative.proposer import DrawnGuess
from engine.speculative.rejection_sampling import accept_or_redraw, residual
from tests.engine.speculative.drafting import sequence_of

pytestmark = pytest.mark.slow

P = np.array([0.05, 0.4, 0.0, 0.3, 0.25])
Q = np.array([0.5, 0.1, 0.2, 0.2, 0.0])
NUM_DRAWS = 20_000
LIMIT = 18.5  # chi-square of 4 degrees of freedom: passed once in a thousand seeds, and these are fixed


def numbers(stream: int) -> np.ndarray:
    positions = np.arange(NUM_DRAWS, dtype=np.uint64)
    return uniform(np.full_like(positions, 7), np.full_like(positions, stream), positions)


def chi_square(rule, p: np.ndarray, q: np.ndarray) -> float:
    """How far the frequencies of the rule's tokens are from `p`, over tokens that it has."""
    drafted = np.searchsorted(q.cumsum(), numbers(0) * q.sum(), side="right")
    pairs = zip(drafted.tolist(), numbers(1), numbers(2), strict=True)
    tokens = [rule(token, p, q, coin, point)[1] for token, coin, point in pairs]
    counts = np.bincount(tokens, minlength=len(p))
    if counts[p == 0].any():
        return np.inf
    expected = NUM_DRAWS * p[p > 0]
    return float(((counts[p > 0] - expected) ** 2 / expected).sum())


def test_tokens_have_the_model_s_distribution():
    assert chi_square(accept_or_redraw, P, Q) < LIMIT


def always(token, p, q, coin, point):
    return True, token


def from_the_model(token, p, q, coin, point):
    """The mistake of drawing a rejected token's stand-in from p, not from what p has more than q."""
    if coin * q[token] < p[token]:
        return True, token
    return False, int(np.searchsorted(p.cumsum(), point, side="right"))


def if_likelier(token, p, q, coin, point):
    """Greedy acceptance at a temperature above 0."""
    if q[token] <= p[token]:
        return True, token
    return accept_or_redraw(token, p, q, 1.0 - 1e-12, point)


@pytest.mark.parametrize("rule", [always, from_the_model, if_likelier])
def test_the_distribution_test_would_notice_a_wrong_rule(rule):
    assert chi_square(rule, P, Q) > 10 * LIMIT


def test_of_a_guess_that_is_no_draw_the_rule_is_to_draw_and_compare():
    """q is 1 at the guess: frequencies of both ways are the model's, and the guess is kept as often."""
    guess, q = 3, np.eye(5)[3]
    assert chi_square(accept_or_redraw, P, q) < LIMIT
    drawn = np.searchsorted(P.cumsum(), numbers(1), side="right")
    kept = [accept_or_redraw(guess, P, q, coin, 0.5)[0] for coin in numbers(2)]
    assert np.mean(kept) == pytest.approx(np.mean(drawn == guess), abs=0.02)


def distributions(size: int):
    weights = st.lists(st.floats(0, 1), min_size=size, max_size=size).filter(lambda w: sum(w) > 1e-3)
    return weights.map(lambda w: np.array(w) / sum(w))


@given(distributions(6), distributions(6), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_a_token_is_kept_as_often_as_it_may_be_and_none_comes_that_the_model_has_not(p, q, coin, point):
    for token in np.flatnonzero(q > 0).tolist():
        is_kept, chosen = accept_or_redraw(token, p, q, coin, point)
        assert is_kept == (coin * q[token] < p[token])
        assert chosen == token if is_kept else residual(p, q)[chosen] > 0
        assert p[chosen] > 0


@given(distributions(6), distributions(6))
def test_what_is_kept_and_what_stands_in_sum_to_the_model(p, q):
    """min(p, q) is kept; the rest has the residual's shape: the proof of the rule, in numbers."""
    kept = np.minimum(p, q)
    assert np.allclose(kept + (1 - kept.sum()) * residual(p, q), p, atol=1e-6)


def test_a_token_that_the_draft_never_draws_is_refused():
    with pytest.raises(ValueError, match=r"token 4 can't have been drawn: its probability by the draft is 0\.0"):
        accept_or_redraw(4, P, Q, 0.5, 0.5)


def sampled_frequencies(q: np.ndarray, monkeypatch: pytest.MonkeyPatch | None = None, rule=None) -> float:
    """Chi-square of the sampler's tokens at temperature 1, where a draft model drew from `q` first."""
    count = 4000
    if monkeypatch is not None and rule is not None:
        monkeypatch.setattr(host_sampler, "accept_or_redraw", rule)
    rows = [sequence_of([0] * (index + 1)) for index in range(count)]
    guesses = np.searchsorted(q.cumsum(), numbers(0)[:count] * q.sum(), side="right").tolist()
    logits = torch.from_numpy(P).float().log().expand(count, -1)
    drawn = {row: DrawnGuess(token, q) for row, token in enumerate(guesses)}
    tokens = [
        token.token_id for token in Sampler([]).sample_each(rows, logits, NO_MASKS, drawn) if not isinstance(token, str)
    ]
    counts = np.bincount(tokens, minlength=len(P))
    assert len(tokens) == count
    if counts[P == 0].any():
        return np.inf
    expected = count * P[P > 0]
    return float(((counts[P > 0] - expected) ** 2 / expected).sum())


def test_the_sampler_keeps_the_model_s_distribution_whatever_a_draft_model_draws():
    assert sampled_frequencies(Q) < LIMIT
    assert sampled_frequencies(np.full(5, 0.2)) < LIMIT


@pytest.mark.parametrize("rule", [always, from_the_model, if_likelier])
def test_that_test_would_notice_a_wrong_rule_as_well(rule, monkeypatch):
    assert sampled_frequencies(Q, monkeypatch, rule) > 5 * LIMIT


def test_a_greedy_answer_keeps_no_guess_but_its_own_token():
    sequence = sequence_of([0, 1], sampling={"temperature": 0.0})
    logits = torch.from_numpy(P).float().log()[None]
    (token,) = Sampler([]).sample_each([sequence], logits, NO_MASKS, {0: DrawnGuess(0, Q)})
    assert not isinstance(token, str) and token.token_id == int(P.argmax())
