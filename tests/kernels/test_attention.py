"""Attention against one softmax per query written as a loop, and what pages, windows and sinks may not change."""

import math

import numpy as np
import pytest
import torch

from kernels import cases as c
from kernels import catalog
from kernels import specs as s
from kernels.caps import Caps

REGISTRY = catalog.registry(Caps("cpu"))


def key_of(cache, table, page, position, head):
    return cache[int(table[position // page]), head, position % page].double().numpy()


def by_loop(spec, q, k, v, table, last, head, kwargs):
    """One query that sees keys up to `last`: its value, and the log of its softmax's denominator."""
    kv_head = head * spec.kv_heads // spec.q_heads
    first = max(0, last + 1 - spec.window) if spec.window else 0
    query, logits, values = q[head].double().numpy(), [], []
    for n in range(first, last + 1):
        key = key_of(k, table, spec.page, n, kv_head)
        logits.append(float(query @ key) * kwargs["sm_scale"] * kwargs["k_scale"])
        values.append(key_of(v, table, spec.page, n, kv_head) * kwargs["v_scale"])
    sink = [float(kwargs["sinks"][head])] if spec.sinks else []
    total = math.fsum(math.exp(x) for x in logits + sink)
    return sum(math.exp(x) / total * value for x, value in zip(logits, values, strict=True)), math.log(total)


DECODE = [
    (s.AttnSpec(4, 2, 32, page=16), [1, 16, 17, 40]),
    (s.AttnSpec(6, 2, 32, page=32, window=5, sinks=True, lse=True), [1, 5, 6, 70]),
    (s.AttnSpec(3, 3, 64, page=16, kv="bf16", lse=True), [33]),
    (s.AttnSpec(4, 1, 32, page=16, q_len=3, lse=True), [3, 20]),
    (s.AttnSpec(2, 1, 32, page=16, q_len=2, window=1, kv="fp32"), [2, 9]),
]


@pytest.mark.parametrize(("spec", "lengths"), DECODE)
def test_decode_is_a_softmax_over_the_keys_each_query_may_see(spec, lengths):
    call = c.attn_case(spec, lengths, 1).make("cpu")
    call.poison()
    call.run(REGISTRY.get("attn_decode", spec))
    q, k, v, table, _, out, _ = call.args
    for b, length in enumerate(lengths):
        for t in range(spec.q_len):
            row = b * spec.q_len + t
            for head in range(spec.q_heads):
                want, lse = by_loop(spec, q[row], k, v, table[b], length - spec.q_len + t, head, call.kwargs)
                assert np.abs(out[row, head].double().numpy() - want).max() < 2e-2
                if spec.lse:
                    assert call.kwargs["lse"][row, head].item() == pytest.approx(lse, abs=1e-4)


def test_prefill_gives_each_new_token_the_keys_before_it():
    spec = s.AttnSpec(2, 1, 32, page=16, window=7, sinks=True, lse=True)
    call = c.prefill_case(spec, [(1, 1), (3, 20), (5, 5)]).make("cpu")
    call.poison()
    call.run(REGISTRY.get("attn_prefill", spec))
    q, k, v, table, lens, starts, _, out, _ = call.args
    for b in range(3):
        for row in range(int(starts[b]), int(starts[b + 1])):
            last = int(lens[b]) - (int(starts[b + 1]) - row)
            for head in range(2):
                want, lse = by_loop(spec, q[row], k, v, table[b], last, head, call.kwargs)
                assert np.abs(out[row, head].double().numpy() - want).max() < 2e-2
                assert call.kwargs["lse"][row, head].item() == pytest.approx(lse, abs=1e-4)


def test_where_the_pages_lie_does_not_matter():
    spec = s.AttnSpec(4, 2, 32, page=16)
    call = c.attn_case(spec, [50], 1).make("cpu")
    q, k, v, table, lens, out, workspace = call.args
    op = REGISTRY.get("attn_decode", spec)
    op(q, k, v, table, lens, out, workspace, **call.kwargs)
    order = torch.randperm(len(k))
    moved = torch.argsort(order)[table.long()].to(torch.int32)
    again = torch.empty_like(out)
    op(q, k[order], v[order], moved, lens, again, workspace, **call.kwargs)
    assert torch.equal(out, again)


def test_keys_beyond_the_end_are_never_read():
    spec = s.AttnSpec(4, 2, 32, page=16)
    call = c.attn_case(spec, [20], 1).make("cpu")
    q, k, v, table, lens, out, workspace = call.args
    op = REGISTRY.get("attn_decode", spec)
    op(q, k, v, table, lens, out, workspace, **call.kwargs)
    again, last = torch.empty_like(out), int(table[0, 1])
    for plane in (k, v):
        plane.view(torch.uint8)[last, :, 4:] = 0x7F  # NaN
    op(q, k, v, table, lens, again, workspace, **call.kwargs)
    assert torch.equal(out, again)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_extreme_queries_stay_finite(scale):
    spec = s.AttnSpec(2, 1, 32, page=16, kv="bf16")
    call = c.attn_case(spec, [33], 1).make("cpu")
    call.args[0].mul_(scale * 1000)
    call.run(REGISTRY.get("attn_decode", spec))
    assert torch.isfinite(call.args[5]).all()


def test_the_fused_step_appends_the_new_token_and_attends_to_it():
    """With values all one but the new token's, the output tells how much weight the new token got."""
    spec = s.FusedAttnSpec(2, 1, 32, page=16, quant="none")
    call = c.fused_attn_case(spec, [18], 1).make("cpu")
    qkv, k, v, table, *_ = call.args
    before = k.clone().view(torch.uint8)
    call.kwargs.update(k_scale=1.0, v_scale=1.0)
    call.run(REGISTRY.get("attn_decode_fused", spec))
    page, slot = int(table[0, 1]), 1
    assert torch.allclose(v[page, 0, slot].float(), qkv.view(4, 32)[3].float(), rtol=0.07, atol=0.01)
    changed = (k.view(torch.uint8) != before).any(-1)
    assert changed[page, 0, slot] and changed.sum() == 1


def test_mla_reads_the_latent_as_key_and_as_value():
    spec = s.MLASpec(3, latent=16, rope=8, page=16)
    call = c.mla_case(spec, [(2, 19)]).make("cpu")
    call.run(REGISTRY.get("mla_attention", spec))
    q, cache, table, _, _, out = call.args
    for t in range(2):
        rows = np.array([cache[int(table[0, n // 16]), n % 16].double().numpy() for n in range(18 + t)])
        for head in range(3):
            logits = rows @ q[t, head].double().numpy() * call.kwargs["sm_scale"] * call.kwargs["scale"]
            weight = np.exp(logits - logits.max())
            want = weight / weight.sum() @ rows[:, :16] * call.kwargs["scale"]
            assert np.abs(out[t, head].double().numpy() - want).max() < 2e-2
