"""The oracle itself, against torch's own operations and against what the formulas promise."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cases as c
from kernels import specs as s
from kernels.reference import attention, elementwise, moe, move, quant, sampling


def test_saturating_rounding_never_makes_nan():
    x = torch.tensor([1e4, -1e9, float("inf"), 448.0, 464.0, 0.0])
    assert quant.to_e4m3(x).float().tolist() == [448, -448, 448, 448, 448, 0]


def test_norm_matches_torch():
    x, w = torch.randn(5, 96), torch.rand(96)
    out = torch.empty(5, 96)
    elementwise.add_rmsnorm_quant(s.NormSpec(96, "none", residual=False), x[None], None, w, 1e-5, out, torch.ones(5))
    assert torch.allclose(out, F.rms_norm(x, (96,), w, 1e-5), atol=1e-5)


def test_attention_matches_torch():
    spec = s.AttnSpec(4, 2, 32, page=16, kv="fp32")
    call = c.prefill_case(spec, [(20, 20), (7, 33)]).make("cpu")
    call.run(lambda *a, **k: attention.attn_prefill(spec, *a, **k))
    q, k_cache, v_cache, table, lens, starts, _, out, _ = call.args
    for b in range(2):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        k, v = (attention.gather(cache, table[b], int(lens[b])).repeat_interleave(2, 0) for cache in (k_cache, v_cache))
        query = q[rows].float().transpose(0, 1)
        mask = torch.ones(query.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - query.shape[1])
        want = F.scaled_dot_product_attention(query, k, v, mask, scale=32**-0.5 * 0.5).transpose(0, 1) * 2.0
        assert (out[rows].float() - want).norm() / want.norm() < 5e-3  # out is bf16


def test_a_window_and_a_sink_take_weight_away():
    spec = s.AttnSpec(2, 1, 32, page=16, window=1, sinks=True, kv="fp32")
    call = c.attn_case(spec, [40], 1).make("cpu")
    call.run(lambda *a, **k: attention.attn_decode(spec, *a, **k))
    _, _, v_cache, table, _, out, _ = call.args
    v = attention.gather(v_cache, table[0], 40)[:, -1]
    share = (out[0].float() / (v * 2.0)).mean(-1)
    assert ((share > 0) & (share < 1)).all()


def test_decode_equals_the_last_row_of_prefill():
    spec = s.AttnSpec(4, 2, 32, page=16, kv="fp32")
    prefill = c.prefill_case(spec, [(9, 30)]).make("cpu")
    prefill.run(lambda *a, **k: attention.attn_prefill(spec, *a, **k))
    q, k, v, table, lens, _, _, out, workspace = prefill.args
    last = torch.empty_like(q[-1:])
    attention.attn_decode(spec, q[-1:], k, v, table, lens, last, workspace, sm_scale=32**-0.5, k_scale=0.5, v_scale=2.0)
    assert torch.equal(last, out[-1:])


def test_experts_match_a_dense_loop():
    spec = s.MoESpec(4, 2, 128, 128)
    call = c.experts_case(spec, 6).make("cpu")
    call.run(lambda *a, **k: moe.moe_experts(spec, *a, **k))
    x, x_scale, weights, ids, w1, s1, w2, s2, out, _ = call.args
    for t in range(6):
        total = torch.zeros(128)
        for j in range(2):
            e = int(ids[t, j])
            gate, up = ((x[t].float() * x_scale[t]) @ (w1[e].float() * s1[e][:, None]).t()).chunk(2)
            total += weights[t, j] * ((F.silu(gate) * up) @ (w2[e].float() * s2[e][:, None]).t())
        assert (out[t].float() - total).norm() / total.norm() < 0.05  # the middle is e4m3


@given(st.integers(0, 2**20), st.integers(0, 2**30 - 1), st.integers(0, 15))
@settings(max_examples=40)
def test_a_changed_word_a_swap_and_another_epoch_all_show(seed, value, where):
    spec = s.MoveSpec(2, 4096, checksum=True)
    buffer = torch.randint(0, 256, (2 * 2 * 4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    before = move.checksums(spec, buffer, 2, 5)
    words = buffer.clone().view(torch.int32)
    words[where * 64] ^= value | 1
    changed = move.checksums(spec, words.view(torch.uint8), 2, 5)
    assert (changed != before).sum() == 1
    assert not torch.equal(before, move.checksums(spec, buffer, 2, 6))
    assert not torch.equal(before, move.checksums(spec, buffer.view(4, -1).flip(0).reshape(-1), 2, 5))


def test_pack_then_unpack_restores_the_pages_and_catches_damage():
    spec = s.MoveSpec(4, 4096, checksum=True)
    cache = torch.randint(0, 256, (4, 9, 8192), dtype=torch.uint8)
    pages, landing = torch.tensor([7, 2, 5]), torch.tensor([1, 8, 0])
    buffer, sums = torch.empty(3 * 4 * 4096, dtype=torch.uint8), torch.empty(12, dtype=torch.int32)
    move.kv_pack(spec, cache, pages, buffer, sums, seed=3, offset=4096)
    other, bad = torch.zeros_like(cache), torch.zeros(1, dtype=torch.int32)
    move.kv_unpack(spec, buffer, other, landing, sums, bad, seed=3, offset=0)
    assert torch.equal(other[:, landing, :4096], cache[:, pages, 4096:]) and not bad
    again = torch.empty_like(sums)
    move.kv_sums(spec, other, landing, again, seed=3)
    assert torch.equal(again, sums)
    other[2, 8, 100] ^= 1
    move.kv_sums(spec, other, landing, again, seed=3)
    assert (again != sums).sum() == 1
    buffer[100] ^= 1
    move.kv_unpack(spec, buffer, other, landing, sums, bad, seed=3, offset=0)
    assert bad


def test_philox_gives_the_published_vectors():
    """Random123's known answers for philox4x32-10: an all-zero counter and key."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert sampling.philox(zero, zero, zero).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]


def test_the_same_seed_and_position_draw_the_same_token_whatever_the_batch():
    spec = s.SampleSpec(200)
    call = c.sample_case(spec, 8).make("cpu")
    call.run(lambda *a, **k: sampling.sample(spec, *a, **k))
    *columns, tokens, _, workspace = call.args
    for b in range(8):
        token = torch.full((1,), -1)
        one = c.KernelCall((*(column[b : b + 1] for column in columns), token, torch.empty(1), workspace))
        one.run(lambda *a, **k: sampling.sample(spec, *a, **k))
        assert token.item() == tokens[b].item()


def test_sampling_follows_the_distribution():
    spec, draws = s.SampleSpec(4), 4000
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    tokens, logprobs = torch.empty(draws, dtype=torch.int64), torch.empty(draws)
    ones = torch.ones(draws)
    sampling.sample(
        spec, p.log().expand(draws, 4), ones, torch.zeros(draws, dtype=torch.int32), ones, ones * 0,
        torch.full((draws,), 11), torch.arange(draws), tokens, logprobs,
        torch.empty(0),
    )  # fmt: skip
    assert torch.allclose(torch.bincount(tokens, minlength=4) / draws, p, atol=0.03)
    assert torch.allclose(logprobs, p.log()[tokens], atol=1e-5)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [(2, 1.0, 0.0, 2), (0, 0.79, 0.0, 2), (0, 0.81, 0.0, 3), (0, 1.0, 0.2, 3), (0, 1.0, 0.0, 4), (3, 0.5, 0.0, 1)],
)
def test_filters_keep_what_they_say(top_k, top_p, min_p, kept):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    mask = sampling.keep(logits, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    assert mask.sum() == kept
