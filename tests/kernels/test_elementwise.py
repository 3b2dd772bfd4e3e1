"""Norm, quantization, SiLU, RoPE and greedy choice against formulas written out in float64 numpy."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels import cases as c
from kernels import catalog
from kernels import specs as s
from kernels.caps import Caps

REGISTRY = catalog.registry(Caps("cpu"))
E4M3 = torch.float8_e4m3fn


def run(op, spec, *args, **kwargs):
    REGISTRY.get(op, spec)(*args, **kwargs)


def e4m3_by_table(x):
    """Nearest of all finite e4m3 values, ties to the even code; beyond the largest it stays the largest."""
    codes = np.arange(127, dtype=np.uint8)
    values = torch.from_numpy(codes).view(E4M3).double().numpy()
    at = np.clip(np.searchsorted(values, np.abs(x)), 1, len(values) - 1)
    low, high = values[at - 1], values[at]
    down, up = np.abs(x) - low, high - np.abs(x)
    nearest = np.where((down < up) | ((down == up) & ((at - 1) % 2 == 0)), low, high)
    return np.copysign(nearest, x)


def norm_by_loops(x, residual, weight, eps):
    """The root mean square norm of x + residual, row by row; the residual is kept in bf16."""
    rows = []
    for i in range(len(residual)):
        total = torch.tensor(x[:, i].sum(0) + residual[i]).to(torch.bfloat16).double().numpy()
        rows.append(total / math.sqrt((total**2).mean() + eps) * weight)
    return np.array(rows)


@pytest.mark.parametrize(("parts", "hidden", "tokens"), [(1, 7, 3), (2, 96, 1), (5, 33, 4)])
def test_norm_adds_parts_and_residual(parts, hidden, tokens):
    call = c.norm_case(s.NormSpec(hidden, "none", parts=parts), tokens).make("cpu")
    x, residual, weight, eps, out, _ = call.args
    want = norm_by_loops(x.double().numpy(), residual.double().numpy(), weight.double().numpy(), eps)
    call.run(lambda *a, **k: run("add_rmsnorm_quant", s.NormSpec(hidden, "none", parts=parts), *a, **k))
    assert np.abs(out.double().numpy() - want).max() <= np.abs(want).max() * 2**-8


def test_norm_per_token_spans_the_range_of_e4m3():
    spec = s.NormSpec(50, "token")
    call = c.norm_case(spec, 4).make("cpu")
    call.run(lambda *a, **k: run("add_rmsnorm_quant", spec, *a, **k))
    out, scale = call.outputs["out"].float(), call.outputs["scale"]
    assert (out.abs().amax(1) == 448).all() and (scale > 0).all()


def test_deferred_scales_equal_scaling_before():
    plain, deferred = s.NormSpec(64, "none"), s.NormSpec(64, "none", deferred=True)
    call = c.norm_case(deferred, 3).make("cpu")
    x, residual, weight, eps, out, scale = call.args
    token, channel = call.kwargs["token_scale"], call.kwargs["channel_scale"]
    scaled = x.float() * token[:, None] * channel
    other, kept = torch.empty_like(out), residual.clone()
    run("add_rmsnorm_quant", plain, scaled, kept, weight, eps, other, scale)
    call.run(lambda *a, **k: run("add_rmsnorm_quant", deferred, *a, **k))
    assert torch.allclose(out.float(), other.float(), rtol=2**-7) and torch.equal(residual, kept)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_bias_comes_after_the_scales_and_stays_in_the_residual(deferred):
    spec = s.NormSpec(48, "none", parts=2, deferred=deferred, biased=True)
    call = c.norm_case(spec, 3).make("cpu")
    x, residual, weight, eps, out, _ = call.args
    product = x.double().sum(0)
    if deferred:
        product = product * call.kwargs["token_scale"].double()[:, None] * call.kwargs["channel_scale"].double()
    added = (product + call.kwargs["bias"].double()).numpy()[None]
    want = norm_by_loops(added, residual.double().numpy(), weight.double().numpy(), eps)
    total = torch.tensor(added[0]) + residual.double()
    call.run(lambda *a, **k: run("add_rmsnorm_quant", spec, *a, **k))
    assert np.abs(out.double().numpy() - want).max() <= np.abs(want).max() * 2**-7
    assert torch.allclose(residual.double(), total, rtol=2**-8)


@pytest.mark.parametrize("spread", [1e-9, 1.0, 1e4, 3e38])
def test_per_token_quantization_rounds_to_the_nearest_code(spread):
    x = (torch.randn(5, 37).clamp(-1, 1) * spread).to(torch.bfloat16)
    out, scale = torch.empty(5, 37, dtype=E4M3), torch.empty(5)
    run("quant_fp8", s.QuantSpec(37), x, out, scale)
    want = e4m3_by_table((x.float() / scale[:, None]).double().numpy())
    assert np.array_equal(out.double().numpy(), want)
    assert torch.isfinite(scale).all()


def test_static_quantization_saturates_and_keeps_its_scale():
    x = torch.tensor([[1e6, -1e6, 0.1, 0.0]]).to(torch.bfloat16)
    out, scale = torch.empty(1, 4, dtype=E4M3), torch.tensor([0.5])
    run("quant_fp8", s.QuantSpec(4, "tensor"), x, out, scale)
    assert out.float().tolist()[0][:2] == [448, -448] and out.float()[0, 3] == 0 and scale.item() == 0.5


def test_a_row_of_zeros_stays_zeros():
    out, scale = torch.empty(1, 8, dtype=E4M3), torch.empty(1)
    run("quant_fp8", s.QuantSpec(8), torch.zeros(1, 8).bfloat16(), out, scale)
    assert (out.float() == 0).all() and scale.item() > 0


@pytest.mark.parametrize("width", [1, 30, 257])
def test_silu_of_the_gate_times_up(width):
    x = torch.randn(3, 2 * width).bfloat16()
    out = torch.empty(3, width, dtype=torch.bfloat16)
    run("silu_mul_quant", s.SiluSpec(width, "none"), x, out, torch.ones(3))
    for row, got in zip(x.double().tolist(), out.double().tolist(), strict=True):
        want = [g / (1 + math.exp(-g)) * u for g, u in zip(row[:width], row[width:], strict=True)]
        assert got == pytest.approx(want, rel=2**-7, abs=1e-6)


def test_rope_turns_each_pair_by_position_times_frequency():
    spec, position = s.RopeSpec(2, 1, 8, page=4, kv="fp32"), 11
    qkv = torch.randn(1, 1, 4 * 8)
    table = c.rotary_table(16, 8, "cpu")
    q, k, v = torch.empty(1, 2, 8), torch.zeros(3, 1, 4, 8), torch.zeros(3, 1, 4, 8)
    run("rope_append", spec, qkv, torch.tensor([position]), torch.tensor([6]), table, q, k, v, k_scale=0.5, v_scale=2.0)
    heads = qkv.view(4, 8).double()
    for head in range(3):
        got = (q[0, head] if head < 2 else k[1, 0, 2] * 0.5).double()
        for i in range(4):
            angle = position * 10000 ** (-2 * i / 8)
            pair = complex(heads[head, i], heads[head, i + 4]) * complex(math.cos(angle), math.sin(angle))
            assert got[i].item() == pytest.approx(pair.real, abs=1e-5)
            assert got[i + 4].item() == pytest.approx(pair.imag, abs=1e-5)
    assert torch.allclose(v[1, 0, 2] * 2.0, qkv.view(4, 8)[3])
    assert k.abs().sum(-1).count_nonzero() == 1, "one slot is written"


def test_smooth_keys_give_softmax_the_same():
    tokens, table = 7, c.rotary_table(16, 32, "cpu")
    qkv, positions, slots = torch.randn(1, tokens, 4 * 32), torch.arange(tokens), torch.arange(tokens)
    weights, keys = [], []
    for smooth in (False, True):
        q, k, v = torch.empty(tokens, 2, 32), torch.zeros(2, 1, 4, 32), torch.zeros(2, 1, 4, 32)
        spec, offset = s.RopeSpec(2, 1, 32, page=4, kv="fp32", smooth=smooth), torch.full((1, 32), 3.0)
        run("rope_append", spec, qkv, positions, slots, table, q, k, v, k_offset=offset)
        keys.append(k.flatten(0, 2)[:tokens])
        weights.append(torch.softmax(q.transpose(0, 1) @ keys[-1].T, -1))
        assert torch.equal(v.flatten(0, 2)[:tokens], qkv[0, :, 3 * 32 :])
    assert torch.allclose(*weights, atol=1e-5)
    assert (keys[0] - keys[1]).abs().mean() > 1


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_scales_then_bias_then_norm_of_each_head_come_before_rope(deferred, biased, normed):
    """The same as rope alone on heads that torch made ready."""
    spec = s.RopeSpec(5, 2, 8, page=4, kv="fp32", parts=2, deferred=deferred, biased=biased, normed=normed)
    call = c.rope_case(spec, 6).make("cpu")
    qkv, positions, slots, table, _, k, v = call.args
    heads = qkv.double().sum(0)
    if deferred:
        heads = heads * call.kwargs["token_scale"].double()[:, None] * call.kwargs["channel_scale"].double()
    if biased:
        heads = heads + call.kwargs["bias"].double()
    if normed:
        each, eps = heads.view(6, 9, 8), call.kwargs["eps"]
        q, key = (
            F.rms_norm(part, (8,), call.kwargs[gain].double(), eps)
            for part, gain in ((each[:, :5], "q_gain"), (each[:, 5:7], "k_gain"))
        )
        heads = torch.cat([q, key, each[:, 7:]], 1).view(6, -1)
    want = torch.empty(6, 5, 8), k.clone(), v.clone()
    plain = s.RopeSpec(5, 2, 8, page=4, kv="fp32")
    run("rope_append", plain, heads.float()[None], positions, slots, table, *want, k_scale=0.5, v_scale=0.25)
    got = torch.empty(6, 5, 8), k, v
    run("rope_append", spec, *call.args[:4], *got, **call.kwargs)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(got, want, strict=True))


def test_argmax_takes_the_first_of_equals():
    logits = torch.tensor([[1.0, 5.0, 5.0], [-2.0, -3.0, -2.0]])
    out = torch.empty(2, dtype=torch.int64)
    run("argmax", s.QuantSpec(3, "none"), logits, out, torch.empty(0))
    assert out.tolist() == [1, 0]


def test_argmax_is_a_token_whatever_the_logits_are():
    nan = float("nan")
    logits = torch.tensor([[1.0, nan, 5.0], [nan, nan, nan], [nan, -math.inf, -2.0]])
    out = torch.empty(3, dtype=torch.int64)
    run("argmax", s.QuantSpec(3, "none"), logits, out, torch.empty(0))
    assert out.tolist() == [2, 0, 2]
