"""Plans: what the tuner tries, how a cache is keyed, and the rules that hold where nothing was tuned."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import tune
from kernels.caps import Caps
from kernels.decode_plan import int4_parts
from kernels.plans import TunedPlans, TuningRefused, cache_path, defaults, load, save
from kernels.registry import Impl, Registry
from kernels.specs import AttnSpec, FusedAttnSpec, GateUpSpec, GemmSpec, MoESpec, W4Spec, W8Spec
from kernels.triton import attn_decode, attn_prefill, attn_stream, gemm_hopper, gemm_w4, gemm_w8, moe
from kernels.workspace import (
    COUNTERS_NBYTES,
    MAX_STATES,
    WIDEN_INT4_TOKENS,
    decode_workspace_nbytes,
    moe_workspace_nbytes,
    widening_workspace_nbytes,
)

H200 = Caps("cuda", 90, "NVIDIA H200", 132, (2, 11, 0), (3, 6, 0), (0, 6, 13))
LLAMA, OSS = AttnSpec(32, 8, 128), AttnSpec(64, 8, 64, sinks=True)


def test_grid_tries_every_combination_once():
    plans = tune.grid(bw=(64, 128), stages=(3, 4, 5))
    assert len(plans) == len({tuple(p.items()) for p in plans}) == 6


def test_every_job_names_a_tunable_implementation():
    from kernels.catalog import IMPLS

    for job in tune.jobs():
        assert any((i.op, i.name) == (job.case.op, job.impl) and i.tunable for i in IMPLS), job.case.name
        assert job.plans and job.bucket > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [(dict(name="NVIDIA H100"), "card NVIDIA H200, and here it is NVIDIA H100"),
     (dict(cc=100), "compute capability 90, and here it is 100"),
     (dict(sm_count=114), "number of multiprocessors 132, and here it is 114"),
     (dict(torch=(2, 12, 0)), r"torch 2\.11\.0, and here it is 2\.12\.0"), (dict(triton=None), "triton 3.6.0, .* none"),
     (dict(flashinfer=None), "flashinfer 0.6.13, .* none")],
)  # fmt: skip
def test_plans_belong_to_one_card_and_its_versions(tmp_path, change, words):
    path = tmp_path / "plans.json"
    save(path, TunedPlans({"op|x": {8: {}}}), H200)
    assert load(path, replace(H200)).tuned
    with pytest.raises(TuningRefused, match=f"plans.json was tuned for {words}: .* run python -m kernels.tune again"):
        load(path, replace(H200, **change))


def test_plans_do_not_outlive_the_kernels_that_they_were_tuned_for(tmp_path, monkeypatch):
    path = cache_path(tmp_path, H200)
    save(path, TunedPlans({"op|x": {8: {}}}), H200)
    (tmp_path / "kernel.py").write_text("changed")
    monkeypatch.setattr("kernels.plans.HERE", tmp_path)
    with pytest.raises(TuningRefused, match="was tuned for kernels "):
        load(path, H200)


def test_architectures_without_plans_of_their_own_have_none():
    assert defaults(100) == {} and defaults(90)


def test_a_tunable_implementation_is_given_its_plans_and_the_architecture():
    impl = Impl("gemm_fp8", "hopper", 1, lambda caps, spec: None, "tests.kernels.test_tune:takes_plans", tunable=True)
    registry = Registry((impl,), H200)
    spec = GemmSpec(6144, 4096, parts=2, skinny=True)
    assert registry.get("gemm_fp8", spec)() == (spec, 90, {"bw": 64, "bx": 8, "bk": 256, "stages": 5, "warps": 4})


def takes_plans(spec, *, plans):
    return spec, plans.cc, plans.pick(8, {})


CUT = [LLAMA, OSS, AttnSpec(64, 8, 64, window=128), AttnSpec(32, 8, 128, kv="bf16")]


@given(st.integers(1, 2048), st.integers(1, 1 << 20), st.sampled_from(CUT))
def test_slices_cover_long_contexts_and_fit_the_workspace(pairs, max_len, spec):
    plan = attn_decode.slice_plan(pairs, max_len, spec)
    blocks = -(-max_len // spec.page)
    assert 1 <= plan["slices"] <= max(1, blocks)
    merge = attn_decode.merge_plan(plan["slices"], 4, spec.head_dim, plan["warps"])
    assert -(-plan["slices"] // merge["GROUP"]) <= merge["GROUP"], "two levels are enough"
    if plan["slices"] > 1:
        assert pairs * attn_decode.num_counted(plan["slices"], merge) * 4 <= COUNTERS_NBYTES
        assert pairs * plan["slices"] <= MAX_STATES


@given(st.integers(1, 600), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 1 << 20))
def test_of_slices_that_sequences_share_there_are_two_for_each_and_they_fit_the_workspace(batch, heads, max_len):
    spec = FusedAttnSpec(4 * heads, heads, 128)
    plan = attn_decode.slice_plan(batch * heads, max_len, spec)
    most = plan.get("most", plan["slices"])
    merge = attn_decode.merge_plan(most, 4, spec.head_dim, plan["warps"])
    assert -(-most // merge["GROUP"]) <= merge["GROUP"], "two levels are enough"
    if "most" in plan:
        assert 4 < batch <= plan["slices"] // 2 and plan["slices"] * heads <= 8 * 132
        assert batch * heads * attn_decode.num_counted(most, merge) * 4 <= COUNTERS_NBYTES
    elif plan["slices"] > 1:
        assert batch * heads * plan["slices"] <= MAX_STATES


@pytest.mark.parametrize(
    ("spec", "batch", "context", "slices", "residents"),
    [(LLAMA, 1, 131072, 132, 8), (LLAMA, 16, 8192, 8, 8), (LLAMA, 128, 1024, 1, 8), (LLAMA, 1, 1024, 16, 1),
     (OSS, 1, 131072, 132, 8), (OSS, 16, 1024, 8, 8), (OSS, 64, 1024, 1, 4)],
)  # fmt: skip
def test_the_measured_shapes_get_the_plan_that_was_measured(spec, batch, context, slices, residents):
    plan = attn_decode.slice_plan(batch * spec.kv_heads, context, spec)
    assert plan["stream"] and (plan["slices"], plan["residents"]) == (slices, residents)


@pytest.mark.parametrize(
    ("spec", "context", "slices", "bulk"),
    [(AttnSpec(64, 8, 64, window=128), 8192, 3, False), (AttnSpec(64, 8, 64, q_len=2), 8192, 8, True),
     (AttnSpec(128, 8, 64), 8192, 8, True), (AttnSpec(32, 8, 128, kv="bf16"), 8192, 4, False),
     (FusedAttnSpec(32, 8, 128), 8192, 132, True), (FusedAttnSpec(64, 8, 128), 1024, 8, False)],
)  # fmt: skip
def test_what_cannot_stream_keeps_its_plan(spec, context, slices, bulk):
    plan = attn_decode.slice_plan(128, context, spec)
    assert (plan["slices"], plan.get("bulk", False), "stream" in plan) == (slices, bulk, False)


@given(st.integers(1, 2048), st.integers(1, 1 << 20), st.sampled_from([LLAMA, OSS, AttnSpec(8, 1, 256)]))
def test_so_many_streaming_ctas_fit_a_multiprocessor_and_no_more(pairs, max_len, spec):
    """A multiprocessor has 228 KiB; each CTA takes one for the system and one or two beside its buffers."""
    plan = attn_stream.stream_plan(pairs, max_len, spec)
    held = re.search(r"held\[(\d+)\]", attn_stream.hold(plan, spec.head_dim))
    kib = ((plan["stages"] - 1) * plan["block"] * 2 * spec.head_dim + int(held[1] if held else 0)) / 1024
    assert pairs * plan["slices"] <= 8 * 132 or plan["slices"] == 1
    assert spec.head_dim > 128 or plan["residents"] * (kib + 3) <= 228
    assert plan["residents"] < 4 or (plan["residents"] + 1) * (kib + 2) > 228


@given(st.integers(2, 132), st.sampled_from([32, 64, 128, 256]))
def test_a_merge_reads_whole_lines_of_l2_that_no_other_reads(slices, dim):
    """It discards what it has read: half a line would take the other half, which a neighbour may not have read yet."""
    part = attn_stream.merge_part(slices, dim)
    assert part * 4 % 128 == 0 and dim % part == 0
    assert slices * part <= 256 * 32  # what a warp can hold


@pytest.mark.parametrize("batch", [1, 3, 64, 300])
def test_a_workspace_of_the_stated_size_holds_every_plan(batch):
    import torch

    nbytes = decode_workspace_nbytes(batch, 8, 16, 128)
    workspace = torch.empty(nbytes, dtype=torch.uint8)
    for context in (64, 1088, 8192, 131072):
        plan = attn_decode.slice_plan(batch * 8, context, LLAMA)
        mid, ml, counter = attn_decode.split_workspace(workspace, batch * 8 * plan["slices"], batch * 8, 16, 128)
        assert mid.numel() == ml.numel() * 64 and counter.numel() == COUNTERS_NBYTES // 4
    with pytest.raises(AssertionError, match="workspace too small"):
        attn_decode.split_workspace(workspace[: 64 << 10], 1024, 0, 16, 128)
    with pytest.raises(AssertionError, match="workspace too small"):
        attn_decode.split_workspace(workspace, 1, COUNTERS_NBYTES // 4 + 1, 16, 128)


SKINNY = [
    GemmSpec(6144, 4096, parts=2),
    GemmSpec(5120, 2880, parts=3),
    GemmSpec(64, 64),
]
IN_GROUPS = [
    GemmSpec(4096, 14336, "group", parts=7),
    GemmSpec(6144, 4096, "block128", parts=2),
    GemmSpec(8192, 28672, "block128"),
    GemmSpec(64, 128, "block128"),
]


@given(st.integers(1, 5000), st.sampled_from(SKINNY), st.booleans())
def test_skinny_tiles_divide_their_share_of_k_and_fit_in_shared_memory(tokens, spec, is_crowded):
    plan = gemm_hopper.fit(gemm_hopper.default_plan(tokens, is_crowded=is_crowded), spec.share)
    assert spec.share % plan["bk"] == 0 and plan["stages"] <= spec.share // plan["bk"]
    assert (plan["bw"] + plan["bx"]) * plan["bk"] * plan["stages"] <= (104 if is_crowded else 200) << 10


@given(st.integers(1, 5000), st.sampled_from([128, 640, 4096, 8192]), st.booleans())
def test_gate_and_up_tiles_divide_k_and_fit_in_shared_memory(tokens, k, is_crowded):
    plan = gemm_hopper.fit(gemm_hopper.default_plan(tokens, dual=True, is_crowded=is_crowded), k)
    assert k % plan["bk"] == 0 and plan["stages"] <= k // plan["bk"]
    assert (2 * plan["bw"] + plan["bx"]) * plan["bk"] * plan["stages"] <= (104 if is_crowded else 200) << 10


@given(st.integers(1, 5000), st.sampled_from(IN_GROUPS), st.booleans())
def test_skinny_tiles_leave_room_for_scales_that_differ_along_k(tokens, spec, is_crowded):
    plan = gemm_hopper.grouped_plan(tokens, spec, is_crowded)
    assert plan["bk"] == 256 and plan["stages"] * 256 < spec.share + 256
    assert gemm_hopper.scale_room(spec) * 128 >= spec.share
    tiles_nbytes = (plan["bw"] + plan["bx"]) * 256 * plan["stages"]
    scales_nbytes = gemm_hopper.scale_room(spec) * plan["bx"] * 4
    room_nbytes = 110 << 10 if is_crowded and plan["stages"] > 2 else 200 << 10
    assert tiles_nbytes + scales_nbytes <= room_nbytes


@given(
    st.integers(1, 4096),
    st.sampled_from([W4Spec(6144, 4096), W4Spec(4096, 14336), W4Spec(64, 128), W4Spec(28672, 4096, parts=2)]),
    st.sampled_from([90, 100, 120]),
)
def test_4_bit_tiles_divide_the_rows_and_hold_few_tokens_whole(tokens, spec, cc):
    plan = gemm_w4.w4_plan(spec, tokens, cc)
    assert spec.n % plan["bw"] == 0 and plan["bx"] >= min(tokens, 64)
    wide = 2 * spec.n * spec.k if tokens >= WIDEN_INT4_TOKENS else 0
    assert widening_workspace_nbytes(spec, tokens) == COUNTERS_NBYTES + wide


@given(st.integers(1, 300), st.sampled_from([64, 4096, 6144, 28672]), st.sampled_from([128, 640, 4096, 14336]))
def test_parts_of_int4_have_steps_of_their_own_and_ctas_that_fit(rows, n, k):
    parts = int4_parts(rows, n, k)
    plan = gemm_w4.w4_plan(W4Spec(n, k, parts), rows)
    assert parts == 1 or (rows <= 128 and -(-k // 256) // parts >= 2)
    assert parts == 1 or n // plan["bw"] * -(-rows // plan["bx"]) * parts <= 3 * 132


@given(st.integers(1, 4096), st.sampled_from([W8Spec(6144, 4096), W8Spec(4096, 14336, "row"), W8Spec(960, 576)]))
def test_8_bit_plans_split_k_only_for_few_tokens(tokens, spec):
    plan = gemm_w8.w8_plan(spec, tokens)
    assert plan["parts"] == 1 or (tokens <= 64 and spec.n // 64 * plan["parts"] <= 512)
    assert plan["bx"] >= min(tokens, 128) and 128 % plan["bw"] == 0
    assert widening_workspace_nbytes(spec, tokens) >= COUNTERS_NBYTES + plan["parts"] * min(tokens, 64) * spec.n * 4


@given(st.integers(1, 9000), st.sampled_from(["e4m3", "mxfp4"]), st.sampled_from([90, 120]))
def test_expert_tiles_hold_about_an_experts_share(tokens, weights, cc):
    plan = moe.expert_plan(MoESpec(32, 4, 2880, 2880, weights=weights), tokens, cc)
    assert 16 <= plan["bx"] <= (128 if cc == 90 else 64)


@given(
    st.integers(1, 3000), st.integers(1, 4), st.sampled_from([4, 8, 100]), st.sampled_from(["e4m3", "mxfp4", "bf16"]),
    st.integers(0, 3000),
)  # fmt: skip
def test_the_stated_expert_workspace_can_be_carved(tokens, top_k, experts, weights, more):
    import torch

    spec = MoESpec(experts, top_k, 512, 384, weights=weights)
    plan = moe.expert_plan(spec, tokens, 90)
    total, bx = tokens * top_k, plan["bx"]
    tiles = min(total, experts) + total // bx
    workspace = torch.empty(moe_workspace_nbytes(spec, tokens + more), dtype=torch.uint8, device="meta")
    views = moe.carve(spec, workspace, total, tiles, bx, plan.get("parts", 1), plan.get("sorts_rows", False))
    starts = [v.storage_offset() * v.element_size() for v in views if v.numel()]
    ends = [start + v.numel() * v.element_size() for v, start in zip(filter(torch.numel, views), starts, strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)), "views overlap"
    assert ends[-1] <= workspace.numel()


def test_rows_are_sorted_where_an_expert_has_many_and_the_hopper_kernel_has_the_layer():
    qwen = MoESpec(128, 8, 2048, 768)
    assert "sorts_rows" not in moe.expert_plan(qwen, 1024, 90)
    assert moe.expert_plan(qwen, 1025, 90)["sorts_rows"]
    odd = [replace(qwen, hidden=2176), replace(qwen, inter=256), replace(qwen, inter=320), replace(qwen, bias=True)]
    for spec in [*odd, replace(qwen, activation="swiglu_oai"), replace(qwen, weights="bf16")]:
        assert "sorts_rows" not in moe.expert_plan(spec, 8192, 90)
    assert "sorts_rows" not in moe.expert_plan(qwen, 8192, 100)


def test_prefill_takes_small_tiles_where_the_registers_are_few():
    assert attn_prefill.prefill_plan(LLAMA, 4096, 90)["bm"] == 128
    assert attn_prefill.prefill_plan(LLAMA, 4096, 120) == dict(bm=64, pack=1, block=64, stages=3, warps=8, widen=False)
    assert attn_prefill.prefill_plan(LLAMA, 3, 90)["bm"] == 16


@given(st.integers(1, 300), st.sampled_from([(32, 8), (64, 8), (12, 4), (8, 8), (71, 1)]), st.sampled_from([0, 128]))
def test_prefill_tiles_hold_whole_groups_of_heads(max_q, heads, window):
    q_heads, kv_heads = heads
    plan = attn_prefill.prefill_plan(AttnSpec(q_heads, kv_heads, 128, window=window), max_q, 90)
    group = q_heads // kv_heads
    assert plan["pack"] in (1, group) and plan["bm"] % plan["pack"] == 0
    assert plan["pack"] == 1 or max_q < 128 or window


def test_specs_have_stable_keys_that_differ():
    specs = [
        GemmSpec(1, 2),
        GemmSpec(2, 1),
        GemmSpec(1, 2, "tensor"),
        GateUpSpec(1, 2),
        FusedAttnSpec(32, 8, 128),
        LLAMA,
    ]
    assert len({spec.key() for spec in specs}) == len(specs)
    assert GemmSpec(1, 2).key() == "n=1,k=2,recipe=row,parts=1,deferred=False,skinny=False"
