"""The shapes the self-check runs.

One or more of every operation, large enough to mean something on a GPU.
"""

from dataclasses import replace

import torch

from kernels.cases import (
    KernelCase,
    argmax_case,
    attn_case,
    experts_case,
    fused_attn_case,
    gate_up_case,
    gemm_case,
    mla_case,
    move_case,
    no_choice_case,
    norm_case,
    prefill_case,
    quant_case,
    rope_case,
    route_case,
    sample_case,
    silu_case,
    w4_case,
    w8_case,
)
from kernels.specs import (
    AttnSpec,
    FusedAttnSpec,
    GateUpSpec,
    GemmSpec,
    MLASpec,
    MoESpec,
    MoveSpec,
    NormSpec,
    QuantSpec,
    RopeSpec,
    SampleSpec,
    SiluSpec,
    W4Spec,
    W8Spec,
)


def cases(device: str) -> list[KernelCase]:
    """Llama-8B and gpt-oss-20B shapes on a GPU; a twelfth of that size on the CPU."""
    return (
        [*decode_cases(), *prefill_cases(), *gemm_cases(), *expert_cases(), *move_cases()]
        if device == "cuda"
        else small_cases()
    )


def decode_cases() -> list[KernelCase]:
    llama, oss = AttnSpec(32, 8, 128), AttnSpec(64, 8, 64, window=128, sinks=True, lse=True)
    lengths = [1, 63, 64, 65, 1088, 1000, 517, 2048]
    return [
        norm_case(NormSpec(4096), 33),
        norm_case(NormSpec(4096, parts=2), 8),
        norm_case(NormSpec(2880, "tensor", deferred=True), 65),
        norm_case(NormSpec(4096, "none", embed=True), 7),
        norm_case(NormSpec(2880, "none", deferred=True, biased=True), 65),
        norm_case(NormSpec(2880, "token", biased=True), 300),
        norm_case(NormSpec(4096, "group", parts=2), 8),
        norm_case(NormSpec(5120, "group", embed=True), 65),
        quant_case(QuantSpec(14336), 17),
        quant_case(QuantSpec(14336, "group"), 17),
        silu_case(SiluSpec(14336), 65),
        silu_case(SiluSpec(2880, "token", deferred=True), 9),
        silu_case(SiluSpec(14336, "group"), 17),
        argmax_case(QuantSpec(128256, "none"), 9),
        rope_case(RopeSpec(32, 8, 128), 67),
        rope_case(RopeSpec(64, 8, 64, parts=2, kv="bf16", deferred=True), 5),
        rope_case(RopeSpec(9, 3, 64, smooth=True), 67),
        rope_case(RopeSpec(32, 8, 128, deferred=True, smooth=True), 5),
        rope_case(RopeSpec(32, 4, 128, deferred=True, normed=True), 67),
        rope_case(RopeSpec(64, 8, 64, deferred=True, biased=True), 67),
        rope_case(RopeSpec(14, 2, 64, kv="bf16", biased=True), 5),
        rope_case(RopeSpec(16, 8, 128, smooth=True, normed=True), 5),
        rope_case(RopeSpec(32, 8, 128, deferred=True, rounded=True), 67),
        rope_case(RopeSpec(40, 8, 128, parts=2, kv="fp32", deferred=True, biased=True, normed=True), 5),
        attn_case(llama, lengths, tolerance=3e-3),
        attn_case(llama, [131072], tolerance=3e-3),
        attn_case(oss, lengths, tolerance=3e-3),
        attn_case(AttnSpec(32, 8, 128, q_len=4), [4, 70, 1088], tolerance=3e-3),
        attn_case(AttnSpec(32, 8, 128, kv="bf16"), lengths, tolerance=5e-3),
        fused_attn_case(FusedAttnSpec(32, 8, 128, parts=2), lengths),
        fused_attn_case(FusedAttnSpec(32, 8, 128, deferred=True, quant="group"), lengths * 9),
        fused_attn_case(FusedAttnSpec(32, 8, 128, quant="none"), [1088]),
        fused_attn_case(FusedAttnSpec(32, 8, 128, parts=2, normed=True), lengths),
        fused_attn_case(FusedAttnSpec(28, 4, 128, deferred=True, biased=True), lengths * 9),
        fused_attn_case(FusedAttnSpec(32, 8, 128), [9000, 1, 4097, 8192]),
        fused_attn_case(FusedAttnSpec(32, 8, 128, parts=2), [1087, 1088, 1089, 1090], behind=[0, 1, 2, 3]),
        fused_attn_case(
            FusedAttnSpec(32, 8, 128),
            [63, 64, 65, 66, 67, 9000, 8190, 8191, 8192, 8193, 8194],
            behind=[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4],
        ),
        fused_attn_case(
            FusedAttnSpec(32, 8, 128, deferred=True),
            [n for _ in range(32) for n in range(1023, 1027)],
            64,
            behind=[0, 1, 2, 3] * 32,
        ),
    ]


def gemm_cases() -> list[KernelCase]:
    return [
        gemm_case(GemmSpec(6144, 4096, parts=2, skinny=True), 1),
        gemm_case(GemmSpec(6144, 4096, skinny=True), 33),
        gemm_case(GemmSpec(4096, 14336, parts=2, skinny=True), 8),
        gemm_case(GemmSpec(5120, 2880, parts=3, skinny=True), 5),
        gemm_case(GemmSpec(2880, 4096, parts=4, skinny=True), 64),
        gemm_case(GemmSpec(4096, 4096, "group", parts=2, skinny=True), 8),
        gemm_case(GemmSpec(6144, 4096, deferred=True), 64),
        gemm_case(GemmSpec(4096, 4096), 1000),
        gemm_case(GemmSpec(4096, 4096, "tensor"), 1000),
        gemm_case(GemmSpec(4096, 4096, "block128"), 1000),
        gemm_case(GemmSpec(4096, 4224, "block128", skinny=True), 7),
        gemm_case(GemmSpec(6144, 4096, "block128", parts=2, skinny=True), 1),
        gemm_case(GemmSpec(28672, 4096, "block128", skinny=True), 17),
        gemm_case(GemmSpec(4096, 14336, "block128", parts=2, skinny=True), 64),
        gemm_case(GemmSpec(4096, 14464, "block128", parts=2, skinny=True), 33),
        gemm_case(GemmSpec(4160, 1408, "block128", skinny=True), 3),
        w8_case(W8Spec(6144, 4096), 1),
        w8_case(W8Spec(4096, 14336), 7),
        w8_case(W8Spec(960, 576, "group32"), 9),
        w8_case(W8Spec(576, 1536, "group32"), 65),
        w8_case(W8Spec(3072, 576, "group32"), 300),
        w8_case(W8Spec(6144, 4096, "row"), 200),
        w8_case(W8Spec(4096, 14336), 1000),
        gate_up_case(GateUpSpec(28672, 4096), 8),
        gate_up_case(GateUpSpec(28672, 4096, "group"), 33),
        gate_up_case(GateUpSpec(28672, 4096, "none"), 128),
        gate_up_case(GateUpSpec(512, 640), 8),
    ]


def prefill_cases() -> list[KernelCase]:
    oss = AttnSpec(64, 8, 64, window=128, sinks=True, lse=True)
    chunks = [(1, 1), (130, 700), (1000, 1000), (257, 4000)]
    return [
        prefill_case(AttnSpec(32, 8, 128), chunks, workspace_mb=8, tolerance=3e-3),
        prefill_case(AttnSpec(32, 8, 128), chunks, workspace_mb=256, tolerance=3e-3),
        prefill_case(oss, chunks, tolerance=3e-3),
        prefill_case(AttnSpec(64, 8, 64, sinks=True), chunks, workspace_mb=256, tolerance=3e-3),
        prefill_case(AttnSpec(32, 8, 128, kv="bf16"), chunks, tolerance=5e-3),
        # few tiles and many keys, which several multiprocessors share
        prefill_case(AttnSpec(32, 8, 128), [(64, 8192)], workspace_mb=64, tolerance=3e-3),
        prefill_case(AttnSpec(32, 8, 128), [(300, 9000), (64, 700), (1, 5000)], workspace_mb=256, tolerance=3e-3),
        prefill_case(AttnSpec(32, 8, 128, kv="bf16"), [(130, 8000), (3, 3)], workspace_mb=64, tolerance=5e-3),
        prefill_case(AttnSpec(64, 8, 64, sinks=True, lse=True), [(10, 9000)], workspace_mb=64, tolerance=3e-3),
        mla_case(MLASpec(128), [(1, 1000), (1, 64), (3, 333)]),
        mla_case(MLASpec(16, kv="e4m3"), [(1, 1000), (5, 65)]),
    ]


def expert_cases() -> list[KernelCase]:
    oss, qwen = MoESpec(32, 4, 2880, 2880, activation="swiglu_oai"), MoESpec(128, 8, 2048, 768)
    return [
        route_case(oss, 257),
        route_case(qwen, 33),
        route_case(replace(oss, bias=True), 33),
        route_case(MoESpec(128, 1, 5120, 8192, scoring="sigmoid"), 100),
        experts_case(oss, 1),
        experts_case(oss, 300),
        experts_case(replace(oss, weights="mxfp4", bias=True), 1),
        experts_case(replace(oss, weights="mxfp4", bias=True), 300),
        experts_case(replace(oss, bias=True), 33),
        experts_case(qwen, 17),
        experts_case(qwen, 1000),
        experts_case(qwen, 2000),
        experts_case(MoESpec(8, 2, 1280, 384, renormalize=False), 300),
        w4_case(W4Spec(6144, 4096), 1),
        w4_case(W4Spec(6144, 4096), 7),
        w4_case(W4Spec(6144, 4096, parts=4), 8, symmetric=True),
        w4_case(W4Spec(4096, 14336, parts=4), 16),
        w4_case(W4Spec(4160, 2944, parts=2), 33),
        w4_case(W4Spec(28672, 4096), 64),
        w4_case(W4Spec(6144, 4096), 65),
        w4_case(W4Spec(6144, 4096), 200),
        w4_case(W4Spec(4096, 14336), 300),
        sample_case(SampleSpec(128256), 16),
        sample_case(SampleSpec(32000), 16, torch.bfloat16),
        no_choice_case(SampleSpec(12000)),
    ]


def move_cases() -> list[KernelCase]:
    plain, checked = MoveSpec(64, 65536), MoveSpec(64, 65536, checksum=True)
    return [
        move_case("kv_pack", plain, 17, 64),
        move_case("kv_pack", checked, 16, 64),
        move_case("kv_pack", MoveSpec(64, 32768, checksum=True), 16, 64, offset=32768),
        move_case("kv_pack", MoveSpec(64, 32768, checksum=True), 16, 64, offset=32768, parts=2),
        move_case("kv_pack", MoveSpec(64, 65536, convert=True, checksum=True), 16, 40),
        move_case("kv_unpack", checked, 16, 64),
        move_case("kv_unpack", MoveSpec(64, 32768), 5, 64, offset=32768),
        move_case("kv_unpack", MoveSpec(64, 32768), 5, 64, offset=32768, parts=2),
        move_case("kv_sums", checked, 16, 64),
    ]


def small_cases() -> list[KernelCase]:
    return [
        norm_case(NormSpec(64), 5),
        gemm_case(GemmSpec(64, 128), 5),
        attn_case(AttnSpec(4, 2, 32, page=16), [5, 33], workspace_mb=1),
    ]
