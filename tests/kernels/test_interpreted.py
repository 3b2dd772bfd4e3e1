"""Numerics of our Triton kernels against the reference, by the interpreter, on odd shapes and extreme values."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(600)  # the child interprets all kernels: a minute and more beside other work


@pytest.fixture(scope="module", params=[0, 1])
def verdicts(request):
    """A child process: TRITON_INTERPRET is read when kernels are decorated. Fresh random inputs for each seed."""
    command = [sys.executable, "-m", "tests.kernels.interpreted", str(request.param)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_kernel_agrees_with_the_reference(verdicts):
    bad = [
        f"{v['op']}/{v['impl']} [{v['case']}]: error {v['error']:.2e} of {v['tolerance']}, {v['failure']}"
        for v in verdicts
        if not v["ok"]
    ]
    assert not bad, "\n".join(bad)


def test_every_operation_with_a_portable_kernel_was_run(verdicts):
    ran = {v["op"] for v in verdicts}
    assert ran >= {
        "add_rmsnorm_quant", "quant_fp8", "silu_mul_quant", "argmax", "rope_append", "attn_decode",
        "attn_decode_fused", "attn_prefill",
        "mla_attention", "gemm_fp8", "gemm_gate_up", "gemm_w4", "gemm_w8", "moe_route", "moe_experts", "sample",
        "penalize", "kv_pack", "kv_unpack", "kv_verify", "kv_sums",
    }  # fmt: skip
