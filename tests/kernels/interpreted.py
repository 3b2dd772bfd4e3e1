"""Our kernels under Triton's interpreter on small odd shapes: verdicts as JSON, for test_interpreted.py."""

import json
import os
import sys
from dataclasses import asdict

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are decorated, hence before the imports below

import torch

from kernels import cases as c
from kernels import catalog
from kernels import specs as s
from kernels.caps import Caps
from kernels.plans import TunedPlans
from kernels.selfcheck import SelfCheckResult, check_case, reference
from tests.kernels.interpreter import patch

BULK, MANY = s.AttnSpec(8, 2, 32, page=64), s.AttnSpec(8, 2, 32, page=16)
HALF_PAGES = s.AttnSpec(8, 2, 32, page=64, sinks=True)
PAIRS, SINGLES = s.AttnSpec(4, 2, 64, page=16), s.AttnSpec(4, 2, 64, page=32)
ONE_SLICE = s.AttnSpec(6, 2, 64, page=32, sinks=True, lse=True)
LARGE_PAGES = s.AttnSpec(4, 2, 32, page=256)
WIDE, FULL = s.AttnSpec(4, 2, 32, page=32), s.AttnSpec(8, 4, 32, page=32)  # FULL: so many tiles that none is shared out
FUSED_BULK = s.FusedAttnSpec(6, 2, 32, page=32)
FUSED_SHARED = s.FusedAttnSpec(6, 2, 32, page=32, parts=2)
TUNED = {
    f"attn_decode/triton|{BULK.key()}": {256: dict(slices=2, block=64, stages=2, warps=1, bulk=True)},
    f"attn_decode/triton|{HALF_PAGES.key()}": {256: dict(slices=20, block=32, stages=2, warps=1, bulk=True)},
    f"attn_decode/triton|{PAIRS.key()}": {256: dict(slices=2, block=16, stages=2, warps=4, pairs=True)},
    f"attn_decode/triton|{SINGLES.key()}": {256: dict(slices=2, block=32, stages=2, warps=1, pairs=False)},
    f"attn_decode/triton|{MANY.key()}": {256: dict(slices=30, block=16, stages=2, warps=1)},
    f"attn_decode/triton|{ONE_SLICE.key()}": {256: dict(stream=True, slices=1, block=16, stages=2, warps=1)},
    f"attn_prefill/triton|{WIDE.key()}": {512: dict(bm=64, block=32, stages=2, warps=4)},
    f"attn_prefill/triton|{LARGE_PAGES.key()}": {512: dict(bm=64, block=32, stages=2, warps=4)},
    f"attn_prefill/triton|{FULL.key()}": {512: dict(bm=16, block=32, stages=2, warps=4)},
    f"attn_decode_fused/triton|{FUSED_BULK.key()}": {256: dict(slices=2, block=32, stages=2, warps=1, bulk=True)},
    f"attn_decode_fused/triton|{FUSED_SHARED.key()}": {
        256: dict(slices=24, most=20, least=32, block=32, stages=2, warps=1, bulk=True)
    },
}
INTERPRETED = ("triton", "triton_skinny")


def suite() -> list[c.KernelCase]:
    return [
        c.norm_case(s.NormSpec(300), 5),
        c.norm_case(s.NormSpec(128, parts=3), 4),
        c.norm_case(s.NormSpec(256, "tensor", deferred=True), 3),
        c.norm_case(s.NormSpec(96, "none", embed=True), 3),
        c.norm_case(s.NormSpec(90, "none", deferred=True, biased=True), 3),
        c.norm_case(s.NormSpec(300, "token", parts=2, biased=True), 4),
        c.norm_case(s.NormSpec(64, "tensor", biased=True, residual=False), 2),
        c.norm_case(s.NormSpec(64, "token", residual=False), 2, spread=1e4),
        c.norm_case(s.NormSpec(384, "group", parts=2), 5),
        c.norm_case(s.NormSpec(128, "group", deferred=True, biased=True), 3, spread=1e4),
        c.norm_case(s.NormSpec(2944, "group", embed=True), 2, spread=1e-9),
        c.quant_case(s.QuantSpec(200), 3, spread=1e-9),
        c.quant_case(s.QuantSpec(200, "tensor"), 3, spread=1e5),
        c.quant_case(s.QuantSpec(640, "group"), 3),
        c.quant_case(s.QuantSpec(2432, "group"), 2, spread=1e-9),
        c.silu_case(s.SiluSpec(96), 3),
        c.silu_case(s.SiluSpec(100, "token", deferred=True), 3),
        c.silu_case(s.SiluSpec(4600, "token", deferred=True), 3),
        c.silu_case(s.SiluSpec(2500, deferred=True), 3),
        c.silu_case(s.SiluSpec(4096, "none"), 2),
        c.silu_case(s.SiluSpec(128, "group"), 3),
        c.silu_case(s.SiluSpec(2432, "group", deferred=True), 3),
        c.argmax_case(s.QuantSpec(1001, "none"), 3),
        c.rope_case(s.RopeSpec(6, 2, 32, page=16), 5),
        c.rope_case(s.RopeSpec(4, 4, 64, page=16, kv="bf16", parts=2, deferred=True), 3),
        c.rope_case(s.RopeSpec(9, 3, 64, page=16, smooth=True), 5),
        c.rope_case(s.RopeSpec(4, 2, 128, page=16, kv="bf16", deferred=True, smooth=True), 3),
        c.rope_case(s.RopeSpec(14, 2, 64, page=16, biased=True), 5),
        c.rope_case(s.RopeSpec(5, 1, 128, page=16, kv="fp32", normed=True), 3),
        c.rope_case(s.RopeSpec(5, 1, 64, page=16, deferred=True, rounded=True), 3),
        c.rope_case(s.RopeSpec(9, 3, 64, page=16, smooth=True, normed=True), 5),
        c.rope_case(s.RopeSpec(7, 7, 64, page=16, kv="bf16", parts=2, biased=True, normed=True), 3),
        c.rope_case(s.RopeSpec(13, 3, 128, page=16, parts=2, deferred=True, biased=True, normed=True), 2),
        c.rope_case(s.RopeSpec(3, 1, 64, page=16, deferred=True, smooth=True, biased=True, normed=True), 3),
        c.attn_case(s.AttnSpec(4, 2, 32, page=16), [1, 16, 33, 100, 0], 1),
        c.attn_case(s.AttnSpec(8, 1, 64, page=16, window=20, sinks=True, lse=True), [5, 20, 90], 1),
        c.attn_case(s.AttnSpec(6, 2, 32, page=32, q_len=3), [3, 40, 65], 1),
        c.attn_case(s.AttnSpec(6, 2, 32, page=16, q_len=5, window=9, sinks=True), [5, 47], 1),
        c.attn_case(s.AttnSpec(4, 4, 32, page=16, kv="bf16"), [17, 31], 1),
        c.attn_case(s.AttnSpec(6, 2, 32, page=16, kv="bf16"), [2, 17, 90, 90, 200], 1, starts=[1, 1, 16, 89, 70]),
        c.fused_attn_case(s.FusedAttnSpec(4, 2, 32, page=16, parts=2), [1, 16, 17, 90], 1),
        c.fused_attn_case(s.FusedAttnSpec(4, 2, 32, page=16, deferred=True, quant="group"), [33, 64], 1),
        c.fused_attn_case(s.FusedAttnSpec(8, 2, 64, page=16, quant="none"), [70], 1),
        c.fused_attn_case(s.FusedAttnSpec(6, 2, 32, page=16, parts=2, normed=True), [1, 40], 1),
        c.fused_attn_case(s.FusedAttnSpec(5, 1, 64, page=16, deferred=True, biased=True), [17, 64], 1),
        c.fused_attn_case(s.FusedAttnSpec(4, 4, 64, page=16, deferred=True, biased=True, normed=True), [33], 1),
        c.fused_attn_case(
            s.FusedAttnSpec(4, 2, 32, page=16, parts=2), [31, 32, 33, 34, 50, 1, 2], 1, [0, 1, 2, 3, 0, 0, 1]
        ),
        c.fused_attn_case(
            s.FusedAttnSpec(8, 2, 64, page=16, deferred=True, biased=True, normed=True), [15, 16, 17], 1, [0, 1, 2]
        ),
        c.fused_attn_case(FUSED_BULK, [70, 63, 64, 65, 66], 1, [0, 0, 1, 2, 3]),
        c.fused_attn_case(FUSED_SHARED, [130, 40, 96, 97, 98], 1, [0, 0, 0, 1, 2]),
        c.gemm_case(s.GemmSpec(128, 256, parts=2, skinny=True), 5),
        c.gemm_case(s.GemmSpec(64, 448, parts=2, skinny=True), 18),
        c.gemm_case(s.GemmSpec(64, 192, skinny=True), 3),
        c.gemm_case(s.GemmSpec(64, 512, parts=3, skinny=True), 2),  # nothing is left for the last part
        c.gemm_case(s.GemmSpec(64, 256, "group", skinny=True), 17),
        c.gemm_case(s.GemmSpec(64, 384, "group", parts=2, skinny=True), 3),
        c.gemm_case(s.GemmSpec(320, 256, "block128", skinny=True), 5),
        c.gemm_case(s.GemmSpec(192, 640, "block128", parts=2, skinny=True), 18),
        c.gemm_case(s.GemmSpec(80, 200), 33),
        c.gemm_case(s.GemmSpec(96, 64, "tensor"), 7),
        c.gemm_case(s.GemmSpec(192, 256, "block128"), 19),
        c.gate_up_case(s.GateUpSpec(256, 128), 5),
        c.gate_up_case(s.GateUpSpec(256, 128, "group"), 3),
        c.gate_up_case(s.GateUpSpec(256, 128, "none"), 18),
        c.prefill_case(s.AttnSpec(4, 2, 32, page=16), [(1, 1), (20, 20), (17, 50)]),
        c.prefill_case(s.AttnSpec(4, 1, 32, page=16, window=24, sinks=True, lse=True), [(40, 70), (3, 90)]),
        c.prefill_case(s.AttnSpec(2, 2, 32, page=16, kv="bf16"), [(33, 47)]),
        c.prefill_case(WIDE, [(300, 333), (260, 260)], workspace_mb=2),
        c.prefill_case(WIDE, [(130, 900), (3, 70)], workspace_mb=24),
        c.prefill_case(WIDE, [(130, 300)], workspace_mb=0),
        c.prefill_case(LARGE_PAGES, [(130, 300)], workspace_mb=4),
        c.prefill_case(FULL, [(300, 333), (70, 260)], workspace_mb=2),
        c.prefill_case(s.AttnSpec(4, 1, 32, page=16), [(17, 2000), (3, 40), (1, 1)], workspace_mb=4),
        c.prefill_case(s.AttnSpec(4, 1, 32, page=16), [(17, 2000), (3, 40), (1, 1)], workspace_mb=4, rounded=True),
        c.prefill_case(WIDE, [(130, 900)], workspace_mb=24, rounded=True),
        c.prefill_case(s.AttnSpec(4, 1, 64, page=16, sinks=True, lse=True), [(33, 1200), (20, 900)], workspace_mb=4),
        c.prefill_case(s.AttnSpec(6, 2, 32, page=16, kv="bf16", lse=True), [(5, 1500)], workspace_mb=4),
        c.prefill_case(s.AttnSpec(4, 1, 32, page=16), [(1, 2000), (1, 40), (1, 1), (1, 700)], workspace_mb=4),
        c.prefill_case(s.AttnSpec(8, 2, 32, page=16, window=24, sinks=True), [(1, 90), (1, 1), (5, 33)]),
        c.attn_case(HALF_PAGES, [1, 33, 64, 96, 700], 2),
        c.attn_case(PAIRS, [17, 50], 1),
        c.attn_case(SINGLES, [17, 50], 1),
        c.attn_case(BULK, [1, 64, 65, 128, 200], 1),
        c.attn_case(MANY, [640, 30], 1),
        c.attn_case(ONE_SLICE, [1, 16, 17, 90], 1),
        c.attn_case(s.AttnSpec(16, 2, 32, page=64, sinks=True), [1, 64, 65, 128, 500], 1),
        c.attn_case(s.AttnSpec(2, 1, 64, page=16, sinks=True, lse=True), [2000], 1),
        c.fused_attn_case(FUSED_BULK, [1, 32, 33, 100], 1),
        c.fused_attn_case(FUSED_SHARED, [1, 32, 33, 1300, 100], 1),
        c.fused_attn_case(FUSED_SHARED, [90] * 17, 1),
        c.mla_case(s.MLASpec(20, 64, 32, page=16), [(1, 37), (3, 5)]),
        c.move_case("kv_pack", s.MoveSpec(4, 4096, checksum=True), 3, 8),
        c.move_case("kv_pack", s.MoveSpec(4, 4096, checksum=True), 3, 8, offset=4096),
        c.move_case("kv_pack", s.MoveSpec(2, 12288, convert=True, checksum=True), 3, 5),
        c.move_case("kv_pack", s.MoveSpec(2, 8192), 2, 5),
        c.move_case("kv_pack", s.MoveSpec(4, 4096, checksum=True), 3, 8, offset=4096, parts=2),
        c.move_case("kv_pack", s.MoveSpec(2, 4096, convert=True, checksum=True), 3, 5, offset=4096, parts=4),
        c.move_case("kv_unpack", s.MoveSpec(4, 8192, checksum=True), 3, 8),
        c.move_case("kv_unpack", s.MoveSpec(4, 4096), 3, 8, offset=4096),
        c.move_case("kv_unpack", s.MoveSpec(4, 4096, checksum=True), 3, 8, offset=4096, parts=2),
        c.move_case("kv_sums", s.MoveSpec(2, 12288, checksum=True), 3, 8),
        c.move_case("kv_sums", s.MoveSpec(4, 4096, checksum=True), 3, 8, offset=4096),
        c.w4_case(s.W4Spec(64, 512), 1, symmetric=True),
        c.w4_case(s.W4Spec(128, 640), 7),
        c.w4_case(s.W4Spec(128, 640, parts=2), 16, symmetric=True),
        c.w4_case(s.W4Spec(256, 1024, parts=2), 33),
        c.w4_case(s.W4Spec(192, 512, parts=4), 64),  # nothing is left for the last two parts
        c.w4_case(s.W4Spec(128, 384), 65, symmetric=True),
        c.w4_case(s.W4Spec(64, 128), 200),
        c.w4_case(s.W4Spec(128, 384), 300),
        c.w8_case(s.W8Spec(64, 256), 5),
        c.w8_case(s.W8Spec(192, 128 * 9), 17),
        c.w8_case(s.W8Spec(200, 320), 70),
        c.w8_case(s.W8Spec(100, 1056, "row"), 3),
        c.w8_case(s.W8Spec(130, 576), 257),
        c.w8_case(s.W8Spec(192, 1056, "group32"), 17),
        c.w8_case(s.W8Spec(70, 72, "group32"), 3),
        c.w8_case(s.W8Spec(70, 72, "group32"), 256),
        c.w8_case(s.W8Spec(64, 128, "row"), 300),
        c.route_case(s.MoESpec(32, 4, 64, 64), 5),
        c.route_case(s.MoESpec(12, 3, 64, 64, renormalize=False), 5),
        c.route_case(s.MoESpec(16, 1, 64, 64, scoring="sigmoid"), 5),
        c.route_case(s.MoESpec(12, 3, 64, 64, bias=True), 5),
        c.route_case(s.MoESpec(9, 2, 64, 64, renormalize=False, bias=True), 3),
        c.experts_case(s.MoESpec(6, 2, 128, 128), 9),
        c.experts_case(s.MoESpec(4, 1, 192, 64, activation="swiglu_oai"), 23),
        c.experts_case(s.MoESpec(8, 2, 64, 64), 1),
        c.experts_case(s.MoESpec(5, 2, 128, 64, bias=True), 7),
        c.experts_case(s.MoESpec(6, 2, 64, 192, weights="bf16"), 9),
        c.experts_case(s.MoESpec(3, 1, 192, 64, activation="swiglu_oai", weights="bf16", bias=True), 20),
        c.experts_case(s.MoESpec(5, 3, 64, 64, weights="bf16"), 300),  # so many that counting is a launch of its own
        c.experts_case(s.MoESpec(4, 2, 64, 192, weights="mxfp4"), 9),
        c.experts_case(s.MoESpec(2, 1, 320, 64, weights="mxfp4"), 130),
        c.experts_case(s.MoESpec(2, 2, 128, 320, weights="mxfp4", bias=True), 40),
        c.experts_case(s.MoESpec(3, 1, 192, 64, activation="swiglu_oai", weights="mxfp4", bias=True), 20),
        c.sample_case(s.SampleSpec(1000), 16),
        c.sample_case(s.SampleSpec(333), 16, torch.bfloat16),
        c.sample_case(s.SampleSpec(100100), 2),
        c.no_choice_case(s.SampleSpec(4500)),
    ]


def main() -> None:
    patch()
    torch.set_num_threads(1)
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    registry = catalog.registry(Caps("cuda", 120, "interpreter", 32, triton=(3, 7)), plans=TunedPlans(TUNED))
    verdicts: list[SelfCheckResult] = []
    for number, case in enumerate(suite()):
        torch.manual_seed(seed + number)  # so that no case changes with those before it
        call = case.make("cpu")
        want = call.copy()
        want.run(reference(registry, case).load(case.spec, registry.plans, registry.caps))
        candidates = [impl for impl in registry.candidates(case.op, case.spec) if impl.name in INTERPRETED]
        verdicts += [check_case(registry, case, impl, call, want, timed=False) for impl in candidates]
    sys.stdout.write(json.dumps([{**asdict(v), "ok": v.ok} for v in verdicts]))


if __name__ == "__main__":
    main()
