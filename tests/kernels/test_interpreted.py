"""Numerics of our Triton kernels against the reference, by the interpreter, on odd shapes and extreme values."""

import json
import os
import subprocess
import sys
import zlib

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]  # the child interprets all kernels: a minute and more beside other work


def child(*arguments):
    """What a module prints in a process of its own: TRITON_INTERPRET is read when kernels are decorated."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_kernel_agrees_with_the_reference():
    """On the same random inputs in every run; `TEST_SEED` takes other ones."""
    verdicts = child("tests.kernels.interpreted", str(zlib.crc32(os.environ.get("TEST_SEED", "").encode())))
    bad = [
        f"{v['op']}/{v['impl']} [{v['case']}]: error {v['error']:.2e} of {v['tolerance']}, {v['failure']}"
        for v in verdicts
        if not v["ok"]
    ]
    assert not bad, "\n".join(bad)
    assert {v["op"] for v in verdicts} >= {
        "add_rmsnorm_quant", "quant_fp8", "silu_mul_quant", "argmax", "rope_append", "attn_decode",
        "attn_decode_fused", "attn_prefill",
        "mla_attention", "gemm_fp8", "gemm_gate_up", "gemm_w4", "gemm_w8", "moe_route", "moe_experts", "sample",
        "kv_pack", "kv_unpack", "kv_sums",
    }, "an operation has no case"  # fmt: skip


@pytest.fixture(scope="module")
def sorts():
    return child("tests.kernels.interpreted_sort")


def test_rows_are_gathered_as_they_are_sorted(sorts):
    for found in sorts:
        total, (order, _) = len(found["ids"]), found["apart"]
        for (*row, scale), assigned in zip(found["rows"], order, strict=True):
            token = 100 * (assigned // found["top_k"])
            has_row = 0 <= assigned < total
            assert row == [token + column if has_row else -1 for column in range(len(row))]
            assert scale == (token if has_row else 0 if assigned == total else -1)


def test_experts_are_sorted_the_same_whether_counted_in_the_sort_or_before(sorts):
    for found in sorts:
        total, order, tiles = len(found["ids"]), [], []
        for expert in range(found["experts"]):
            rows = [i for i, chosen in enumerate(found["ids"]) if chosen == expert]
            padded = -(-len(rows) // found["bx"]) * found["bx"]
            order += rows + [total] * (padded - len(rows))
            tiles += [expert] * (padded // found["bx"])
        assert found["together"] == found["apart"]
        got_order, got_tiles = found["together"]
        assert got_order == order + [-7] * (len(got_order) - len(order))  # what nobody has is left alone
        assert got_tiles == tiles + [-1] * (len(got_tiles) - len(tiles) - 1) + [len(tiles)]


def test_slices_are_shared_out_by_length_each_once_and_none_much_longer_than_need_be():
    for found in child("tests.kernels.interpreted_turns"):
        lengths, slices = found["lengths"], {}
        for place, (seq, slice_id, count, first) in enumerate(found["turns"]):
            if seq < len(lengths):
                assert first + slice_id == place
                slices.setdefault(seq, (count, []))[1].append(slice_id)
        assert sorted(slices) == list(range(len(lengths)))
        assert all(places == list(range(count)) for count, places in slices.values())
        # Keys to a slice with which there are surely enough.
        fewest = sum(lengths) / (found["slices"] - len(lengths) + 1)
        for length, (count, _) in zip(lengths, (slices[i] for i in range(len(lengths))), strict=True):
            assert 1 <= count <= min(64, -(-length // 256))
            assert count == 64 or length / count <= max(fewest, 256) + 1
