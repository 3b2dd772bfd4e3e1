"""Logits as requests want them changed, beside the same rules written out for one row."""

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.sampling.host_sampler import Sampler
from engine.sampling.logits_processors import TokenCounts
from engine.sampling.token_masks import NO_MASKS, TokenMasks
from engine.sequence import Sequence

VOCAB, EOS = 21, 3  # no whole bytes of bits
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": st.dictionaries(st.integers(0, VOCAB + 2), st.floats(-100, 100, width=32), max_size=6),
        "repetition_penalty": st.floats(0.5, 2.0, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
        "min_tokens": st.integers(0, 4),
        "bad_words": st.lists(st.lists(st.integers(0, VOCAB), min_size=1, max_size=3).map(tuple), max_size=8).map(
            tuple
        ),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple),
    },
)


def only(row, plain, allowed):
    left = np.where(allowed, row, -np.inf)
    return left if np.isfinite(left).any() else np.where(allowed, plain, -np.inf)


def expected(plain, sequence, guided):
    """One wish after the other, from what there is of the sequence now."""
    params, row, f32 = sequence.sampling, plain.copy(), np.float32
    whole, answer = list(sequence.tokens), list(sequence.tokens[sequence.answer_start :])
    for token, bias in params.logit_bias.items():
        if token < VOCAB:
            row[token] += f32(bias)
    for token in set(whole):
        by = f32(params.repetition_penalty)
        row[token] = row[token] / by if row[token] > 0 else row[token] * by
    for token in set(answer):
        row[token] -= f32(params.presence_penalty + params.frequency_penalty * answer.count(token))
    if len(answer) < params.min_tokens:
        row[EOS] = -np.inf
    for *before, last in params.bad_words:
        if last < VOCAB and answer[len(answer) - len(before) :] == before and len(answer) >= len(before):
            row[last] = -np.inf
    if params.allowed_token_ids:
        row = only(row, plain, np.isin(np.arange(VOCAB), params.allowed_token_ids))
    return row if guided is None else only(row, plain, guided)


def masks_of(bits, dice):
    """Return the masks of these requests, in an order of their own, of more tokens than the model has."""
    names = dice.permutation(list(bits)).tolist() if dice.random() < 0.5 else list(bits)
    rows = [np.pad(bits[name], (0, 5), constant_values=255) for name in names]
    packed = torch.from_numpy(np.array(rows, np.uint8).reshape(len(rows), -1)) if rows else torch.empty(0, 0)
    return TokenMasks(packed, {name: row for row, name in enumerate(names)})


@given(st.lists(st.tuples(wishes, tokens, tokens, st.booleans()), min_size=1, max_size=4), st.integers(0, 2**16))
def test_a_batch_gets_what_each_row_wants(asked, seed):
    """Token by token, so that what is kept of a sequence is what its tokens say."""
    rng, dice, sampler = np.random.default_rng(seed), np.random.default_rng(seed + 1), Sampler([EOS])
    rows = [
        Sequence(RequestId(str(index)), [0, *prompt], SamplingParams(max_tokens=99, seed=0, **wants))
        for index, (wants, prompt, _, _) in enumerate(asked)
    ]
    for step in range(max(len(answer) for _, _, answer, _ in asked) + 1):
        logits = rng.normal(0, 3, (len(rows), VOCAB)).astype(np.float32)
        allowed = [rng.random(VOCAB) < 0.3 if guided else None for _, _, _, guided in asked]
        bits = {
            row.request_id: np.packbits(mask, bitorder="little")
            for row, mask in zip(rows, allowed, strict=True)
            if mask is not None and sampler.adjusts(row)
        }
        found = sampler.adjusted(rows, torch.from_numpy(logits), masks_of(bits, dice)).numpy()
        for row, sequence in enumerate(rows):
            mask = allowed[row] if sequence.request_id in bits else None
            np.testing.assert_array_equal(found[row], expected(logits[row], sequence, mask), strict=True)
            answer = asked[row][2]
            sequence.tokens.extend(answer[step : step + 1])


@given(tokens, st.lists(tokens, max_size=5), st.booleans())
def test_tokens_are_counted_once_each_however_many_come_at_a_time(prompt, pieces, with_prompt):
    told, start = list(prompt), len(prompt)
    seen = TokenCounts(array("i", told), 0 if with_prompt else start, start, 1.0, 0.5)
    for piece in pieces:
        told += piece
        seen.follow(array("i", told))
    answer = told[start:]
    assert sorted(seen.ids) == sorted(set(told if with_prompt else answer))
    amounts = {token: 1.0 + 0.5 * answer.count(token) if token in answer else 0.0 for token in seen.ids}
    assert dict(zip(seen.ids, seen.amounts, strict=True)) == amounts


def test_the_logits_of_who_wants_nothing_are_not_copied():
    logits = torch.randn(1, VOCAB)
    plain = Sequence(RequestId("r"), [0], SamplingParams(max_tokens=1, seed=0))
    assert Sampler([EOS]).adjusted([plain], logits, NO_MASKS) is logits


def test_an_allowed_token_that_the_model_does_not_have_is_refused():
    wants = SamplingParams(max_tokens=1, seed=0, allowed_token_ids=(VOCAB,))
    with pytest.raises(IndexError):
        Sampler([EOS]).adjusted([Sequence(RequestId("r"), [0], wants)], torch.zeros(1, VOCAB), NO_MASKS)
