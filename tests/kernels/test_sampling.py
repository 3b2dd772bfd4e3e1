"""Sampling and penalties against Python loops: what is kept, what is drawn, what repeats."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels import cases as c
from kernels import catalog
from kernels import specs as s
from kernels.caps import Caps
from kernels.reference import sampling

REGISTRY = catalog.registry(Caps("cpu"))
U32 = 0xFFFFFFFF


def philox_by_hand(seed, low, high):
    """Philox4x32-10 in Python integers, as the paper writes its rounds."""
    counter, key = [low, high, 0, 0], [seed & U32, seed >> 32 & U32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [second >> 32 ^ counter[1] ^ key[0], second & U32, first >> 32 ^ counter[3] ^ key[1], first & U32]
        key = [key[0] + 0x9E3779B9 & U32, key[1] + 0xBB67AE85 & U32]
    return counter


@given(st.integers(0, 2**62), st.integers(0, U32), st.integers(0, U32))
@settings(max_examples=60)
def test_philox_is_the_papers(seed, low, high):
    got = sampling.philox(torch.tensor([seed]), torch.tensor([low]), torch.tensor([high]))[0].tolist()
    assert got == philox_by_hand(seed, low, high)


def kept_by_hand(logits, temperature, top_k, top_p, min_p):
    """Ties aside: those near the best, the top_k largest of them, then the fewest of these that reach top_p."""
    scaled = [x / temperature for x in logits]
    near = [i for i, x in enumerate(scaled) if x >= max(scaled) + math.log(max(min_p, 1e-30))]
    order = sorted(near, key=lambda i: -scaled[i])[: top_k or None]
    whole = sum(math.exp(scaled[i]) for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass < top_p or not kept:
            kept.append(i)
        mass += math.exp(scaled[i]) / whole
    return set(kept)


@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=12, unique_by=lambda x: round(x, 2)),
    st.floats(0.2, 3), st.integers(0, 12), st.floats(0.05, 1), st.floats(0, 0.5),
)  # fmt: skip
@example([0.0, 4.0, -1.0], 0.21875, 0, 1.0, 0.0)  # two shares that float32 does not tell from none
@settings(max_examples=120)
def test_a_token_is_drawn_from_those_that_stay(logits, temperature, top_k, top_p, min_p):
    scaled = torch.tensor([logits]) / temperature
    mask = sampling.keep(scaled, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))[0]
    want = kept_by_hand(logits, temperature, top_k, top_p, min_p)
    edge = {i for i in want ^ set(mask.nonzero().flatten().tolist())}
    assert len(edge) <= 1, "only a token on the very edge of top-p or min-p may differ, by rounding"
    assert mask[max(range(len(logits)), key=lambda i: logits[i])]


def draw(logits, seed: float = 5, **changes):
    n = len(logits)
    settings_ = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) | changes
    row = {name: torch.full((n,), float(value)) for name, value in settings_.items()}
    tokens, logprobs = torch.empty(n, dtype=torch.int64), torch.empty(n)
    REGISTRY.get("sample", s.SampleSpec(logits.shape[1]))(
        logits, row["temperature"], row["top_k"].int(), row["top_p"], row["min_p"], torch.full((n,), int(seed)),
        torch.arange(n), tokens, logprobs, torch.empty(0),
    )  # fmt: skip
    return tokens, logprobs


def test_the_largest_random_number_is_no_infinite_noise():
    """24 bits and a half are rounded to 1 in float32, which made the noise infinite.

    One token in 130 was drawn for it.
    """
    seed, token = c.ALL_ONES
    noise = sampling.gumbel(torch.tensor([seed]), torch.tensor([0]), 128256)
    assert noise[0, token] == noise.max() and noise.isfinite().all()
    logits = torch.zeros(1, 128256)
    logits[0, token] = -40.0
    tokens, _ = draw(logits, seed)
    assert tokens.item() != token


def test_noise_is_the_logarithms_to_its_ends(monkeypatch):
    """From few bits it ends early, and tokens less likely than the last one's share are never drawn, or too seldom."""
    bits = torch.cat([2 ** torch.arange(33) - 1, 2**32 - 2 ** torch.arange(32), torch.arange(0, 2**32, 999_999)])
    words = torch.nn.functional.pad(bits, (0, -len(bits) % 4)).view(1, -1, 4)
    monkeypatch.setattr(sampling, "philox", lambda *_: words)
    noise = sampling.gumbel(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), len(bits))[0]
    want = -torch.log(-torch.log1p(-((2**32 - 1 - bits).double() + 0.5) / 2**32))
    fine = want > -2
    torch.testing.assert_close(noise[fine].double(), want[fine], rtol=0, atol=2e-5)
    assert (noise[~fine] < -1.9).all() and noise.min() > -2.9 and 22.8 < noise.max() < 22.9


def test_temperature_zero_is_greedy_whatever_else_is_asked():
    logits = torch.randn(20, 50)
    for changes in ({}, dict(top_k=3), dict(top_p=0.1), dict(min_p=0.9)):
        assert torch.equal(draw(logits, temperature=0.0, **changes)[0], logits.argmax(-1))


def test_top_k_of_one_and_a_tiny_top_p_are_greedy_too():
    logits = torch.randn(20, 50)
    assert torch.equal(draw(logits, top_k=1)[0], logits.argmax(-1))
    for top_p in (1e-6, 0.0):
        assert torch.equal(draw(logits, top_p=top_p)[0], logits.argmax(-1))


def test_the_logprob_is_that_of_the_model_and_not_of_the_filtered_distribution():
    logits = torch.randn(8, 30)
    tokens, logprobs = draw(logits, temperature=2.0, top_k=2)
    for row, token, got in zip(logits.double().tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
        assert got == pytest.approx(row[token] - math.log(sum(map(math.exp, row))), abs=1e-5)


def test_another_position_or_seed_draws_afresh():
    logits = torch.zeros(64, 1000)
    tokens, _ = draw(logits)
    assert len(set(tokens.tolist())) > 50


def test_every_row_of_the_standard_case_takes_another_way():
    call = c.sample_case(s.SampleSpec(64), 8).make("cpu")
    _, temperature, top_k, top_p, min_p, *_ = call.args
    ways = set(zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True))
    assert len(ways) == 8
