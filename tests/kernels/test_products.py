"""Products against plain float64 loops: FP8 by every recipe, SiLU epilogue, 4-bit weights, two 4-bit sides, experts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels import cases as c
from kernels import catalog, layouts
from kernels import specs as s
from kernels.caps import Caps

REGISTRY = catalog.registry(Caps("cpu"))
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def run(case, call):
    call.poison()
    call.run(REGISTRY.get(case.op, case.spec))


def f64(tensor):
    return tensor.double().numpy()


def distance(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def scale_of(recipe, a_scale, w_scale, m, n, k):
    """The factor of a[m, k] * w[n, k] as each recipe defines it."""
    if recipe == "tensor":
        return a_scale[0] * w_scale[0]
    if recipe == "row":
        return a_scale[m] * w_scale[n]
    if recipe == "group":
        return a_scale[k // 128, m] * w_scale[n]
    return a_scale[k // 128, m] * w_scale[n // 128, k // 128]


@pytest.mark.parametrize(
    ("recipe", "tokens", "n", "k"),
    [("tensor", 3, 5, 7), ("row", 1, 9, 30), ("group", 2, 4, 256), ("block128", 3, 130, 256), ("row", 2, 1, 1)],
)
def test_fp8_products_scale_each_term_as_the_recipe_says(recipe, tokens, n, k):
    case = c.gemm_case(s.GemmSpec(n, k, recipe), tokens)
    call = case.make("cpu")
    a, w, a_scale, w_scale = map(f64, call.args[:4])
    want = np.zeros((tokens, n))
    for i in range(tokens):
        for j in range(n):
            want[i, j] = math.fsum(a[i, p] * w[j, p] * scale_of(recipe, a_scale, w_scale, i, j, p) for p in range(k))
    run(case, call)
    assert distance(f64(call.outputs["out"]), want) < 4e-3  # out is bf16


@pytest.mark.parametrize(
    ("case", "shape", "atol"),
    [
        (c.gemm_case(s.GemmSpec(12, 384, parts=3), 4), (3, 4, 12), 1e-5),
        (c.w4_case(s.W4Spec(64, 1280, parts=2), 3), (2, 3, 64), 1e-4),
    ],
    ids=["fp8", "int4"],
)
def test_parts_add_up_to_the_whole_product(case, shape, atol):
    call = case.make("cpu")
    run(case, call)
    parts, full = call.outputs["out"], torch.empty(shape[1:])
    whole = [full if value is parts else value for value in call.args]
    REGISTRY.get(case.op, replace(case.spec, parts=1))(*whole)
    assert parts.shape == shape and torch.allclose(parts.sum(0), full, rtol=1e-4, atol=atol)
    assert not torch.allclose(parts[0], full, rtol=0.1)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("k", [64, 512, 2880, 4096])
def test_parts_take_every_column_once(parts, k):
    for spec, step in ((s.GemmSpec(64, k, parts=parts), 128), (s.W4Spec(64, k, parts=parts), 256)):
        assert spec.share % step == 0
        taken = [column for part in range(parts) for column in range(k)[part * spec.share : (part + 1) * spec.share]]
        assert taken == list(range(k))


def test_a_deferred_product_has_no_scales_in_it():
    spec = s.GemmSpec(6, 40, deferred=True)
    a, w, a_scale, w_scale, out = c.gemm_case(spec, 3).make("cpu").args
    REGISTRY.get("gemm_fp8", spec)(a, w, a_scale * 7, w_scale * 9, out)
    assert distance(f64(out), f64(a) @ f64(w).T) < 4e-3


@pytest.mark.parametrize("quant_to", ["none", "tensor", "group"])
def test_gate_up_is_silu_of_one_half_times_the_other(quant_to):
    case = c.gate_up_case(s.GateUpSpec(512, 128, quant_to), 3)
    call = case.make("cpu")
    a, w, a_scale, w_scale = map(f64, call.args[:4])
    both = (a * a_scale[:3, None]) @ (w * w_scale[:, None]).T
    gate, up = both[:, :256], both[:, 256:]
    want = gate / (1 + np.exp(-gate)) * up
    run(case, call)
    got, scale = f64(call.args[4]), f64(call.args[5])
    if quant_to == "tensor":
        got = got * scale[0]
    if quant_to == "group":
        got = got * np.repeat(scale.T, 128, 1)
        assert (np.abs(f64(call.args[4])).reshape(3, 2, 128).max(-1) == 448).all()
    assert distance(got, want) < (4e-3 if quant_to == "none" else 4e-2)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("k", [128, 384])
def test_int4_weights_mean_what_their_tiles_say(k, symmetric):
    """Codes are read back one by one from the tiles as the docstring of tile_int4 describes them."""
    case = c.w4_case(s.W4Spec(64, k), 2, symmetric)
    call = case.make("cpu")
    a, words, factors, out, _ = call.args
    places = [first + 8 * pair + i for first in (0, 2, 4, 6) for pair in range(4) for i in range(2)]
    want = np.zeros((2, 64))
    for n in range(64):
        for p in range(k):
            word = int(words[0, p // 128, n, places.index(p % 32)])
            factor = factors[0, p // 256, n, p // 128 % 2]
            zero, scale = int(factor) & 15, float((factor & -16).view(torch.float32))
            assert zero == 8 or not symmetric
            want[:, n] += f64(a)[:, p] * ((word >> p % 128 // 32 * 4 & 15) - zero) * scale
    run(case, call)
    assert distance(f64(out), want) < 4e-3


@pytest.mark.parametrize(
    ("recipe", "tokens", "n", "k"), [("row", 2, 9, 30), ("group32", 2, 9, 70), ("block128", 3, 130, 200)]
)
def test_8_bit_weights_have_the_scale_of_their_row_or_block(recipe, tokens, n, k):
    case = c.w8_case(s.W8Spec(n, k, recipe), tokens)
    call = case.make("cpu")
    a, w, scale = map(f64, call.args[:3])
    rows, columns = {"row": (1, k), "group32": (1, 32), "block128": (128, 128)}[recipe]
    scale = scale.reshape(-(-n // rows), -(-k // columns))
    want = np.zeros((tokens, n))
    for i in range(tokens):
        for j in range(n):
            want[i, j] = math.fsum(a[i, p] * w[j, p] * scale[j // rows, p // columns] for p in range(k))
    run(case, call)
    assert distance(f64(call.outputs["out"]), want) < 4e-3


@pytest.mark.parametrize("weights", ["e4m3", "mxfp4", "bf16", "fp32"])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_of_gpt_oss_add_their_biases_and_clamp(weights, bias):
    spec = s.MoESpec(3, 2, 64, 64, activation="swiglu_oai", weights=weights, bias=bias)
    case = c.experts_case(spec, 4)
    call = case.make("cpu")
    x, x_scale, share, ids, w1, s1, w2, s2, out, _ = call.args
    tokens = f64(x) * f64(x_scale)[:, None] if weights == "e4m3" else f64(x)
    want = np.zeros((4, 64))
    for t in range(4):
        for slot in range(2):
            e = int(ids[t, slot])
            first, second = (dense(weights, w[e], sc[e]) for w, sc in ((w1, s1), (w2, s2)))
            if weights == "mxfp4":
                first = layouts.unpair_gate_up(torch.from_numpy(first)).numpy()
            both = first @ tokens[t] + (f64(call.kwargs["b1"])[e] if bias else 0)
            gate, up = np.minimum(both[:64], 7), np.clip(both[64:], -7, 7)
            middle = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            want[t] += float(share[t, slot]) * (second @ middle + (f64(call.kwargs["b2"])[e] if bias else 0))
    run(case, call)
    assert distance(f64(out), want) < (0.04 if weights == "e4m3" else 6e-3)


def dense(weights, w, scale):
    if weights == "e4m3":
        return f64(w) * f64(scale)[:, None]
    if weights in c.PLAIN:
        return f64(w)
    codes, exponents = layouts.untile_mxfp4(w, scale)
    return np.array(E2M1)[codes.numpy()] * np.repeat(2.0 ** (f64(exponents) - 127), 32, 1)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_routing_picks_the_largest_logits(scoring, renormalize, bias):
    spec = s.MoESpec(7, 3, 64, 64, renormalize, scoring, bias=bias)
    call = c.route_case(spec, 5).make("cpu")
    logits, weights, ids = call.args
    call.run(REGISTRY.get("moe_route", spec))
    scores = logits.double() + (call.kwargs["bias"].double() if bias else 0)
    for row, share, chosen in zip(scores.tolist(), weights.tolist(), ids.tolist(), strict=True):
        assert chosen == sorted(range(7), key=lambda e: -row[e])[:3]
        score = [1 / (1 + math.exp(-v)) if scoring == "sigmoid" else math.exp(v) for v in row]
        whole = sum(score[e] for e in chosen) if renormalize else 1.0 if scoring == "sigmoid" else sum(score)
        assert share == pytest.approx([score[e] / whole for e in chosen], rel=1e-5)


def test_equal_logits_go_to_the_lower_expert():
    spec = s.MoESpec(4, 2, 64, 64)
    weights, ids = torch.empty(1, 2), torch.empty(1, 2, dtype=torch.int32)
    REGISTRY.get("moe_route", spec)(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), weights, ids)
    assert ids.tolist() == [[1, 2]] and weights.tolist() == [[0.5, 0.5]]
