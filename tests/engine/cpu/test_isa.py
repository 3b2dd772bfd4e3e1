"""The CPU probe: asked once, remembered, and a child that dies is an answer, not a crash."""

import json
import logging
import os
import signal
import subprocess

import pytest
import torch

from kernels.cpu import isa, mkl
from kernels.cpu.isa import SAFE_CAP, CpuIsa, apply_isa, is_bfloat16_fast, probe_isa


def test_the_answer_is_remembered(tmp_path, monkeypatch):
    first = probe_isa(tmp_path / "new")
    monkeypatch.setattr(isa, "_run_child", lambda cap: pytest.fail("probed again"))
    assert probe_isa(tmp_path / "new") == first
    assert first.has_bfloat16 == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def child(outcomes: dict[str | None, int]):
    """A child process that ends as told for each cap."""

    def run(command, env, **kwargs):
        code = outcomes[env.get(isa.ONEDNN_VARIABLE)]
        return subprocess.CompletedProcess(command, code, json.dumps({"has_bfloat16": True}), "")

    return run


def test_a_crash_without_the_cap_means_the_cap(tmp_path, monkeypatch):
    monkeypatch.delenv(isa.ONEDNN_VARIABLE, raising=False)
    monkeypatch.setattr(subprocess, "run", child({None: -signal.SIGILL, SAFE_CAP: 0}))
    assert probe_isa(tmp_path) == CpuIsa(SAFE_CAP, True)


def test_what_was_found_without_a_cap_says_nothing_of_one_that_the_operator_sets(tmp_path, monkeypatch):
    monkeypatch.delenv(isa.ONEDNN_VARIABLE, raising=False)
    monkeypatch.setattr(isa, "_run_child", lambda cap: not cap)
    assert probe_isa(tmp_path) == CpuIsa(None, True)
    monkeypatch.setenv(isa.ONEDNN_VARIABLE, "AVX512_CORE")
    assert probe_isa(tmp_path) == CpuIsa("AVX512_CORE", False)
    monkeypatch.delenv(isa.ONEDNN_VARIABLE)
    assert probe_isa(tmp_path) == CpuIsa(None, True)


def test_a_crash_even_with_the_cap_means_no_bfloat16(tmp_path, monkeypatch):
    monkeypatch.delenv(isa.ONEDNN_VARIABLE, raising=False)
    monkeypatch.setattr(subprocess, "run", child({None: -signal.SIGILL, SAFE_CAP: -signal.SIGILL}))
    assert probe_isa(tmp_path) == CpuIsa(SAFE_CAP, False)


def test_a_damaged_memory_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", child({None: 0, SAFE_CAP: 0}))
    monkeypatch.delenv(isa.ONEDNN_VARIABLE, raising=False)
    probe_isa(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    assert probe_isa(tmp_path) == CpuIsa(None, True)
    assert json.loads(file.read_text()) == {"onednn_cap": None, "has_bfloat16": True}


def test_a_folder_that_cannot_be_written_is_only_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(subprocess, "run", child({None: 0, SAFE_CAP: 0}))
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert probe_isa(blocked / "cache").has_bfloat16
    assert "cannot remember the CPU probe" in caplog.text


def test_the_cap_is_applied_and_said(monkeypatch, caplog):
    monkeypatch.delenv(isa.ONEDNN_VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING):
        apply_isa(CpuIsa(SAFE_CAP, True))
    assert isa.os.environ[isa.ONEDNN_VARIABLE] == SAFE_CAP and "capping oneDNN" in caplog.text
    monkeypatch.delenv(isa.ONEDNN_VARIABLE)


@pytest.mark.parametrize(
    ("lines", "mode"),
    [
        (
            {"vendor_id": "vendor_id : GenuineIntel", "flags": "flags : avx2 avx512f avx512dq avx512bw avx512vl"},
            "AVX512,STRICT",
        ),
        ({"vendor_id": "vendor_id : GenuineIntel", "flags": "flags : avx2"}, "AVX2,STRICT"),
        ({"vendor_id": "vendor_id : AuthenticAMD", "flags": "flags : avx2 avx512f"}, None),
        ({"vendor_id": "vendor_id : GenuineIntel", "flags": "flags : avx2 avx512f"}, "AVX2,STRICT"),
        ({"vendor_id": "vendor_id : GenuineIntel", "flags": "flags : sse4_2"}, None),
        ({"vendor_id": "", "flags": ""}, None),
    ],
)
def test_mkl_sums_strictly_on_intel_alone(monkeypatch, lines: dict[str, str], mode: str | None):
    monkeypatch.setattr(mkl, "cpu_lines", lambda field: lines[field])
    monkeypatch.delenv(mkl.MKL_VARIABLE, raising=False)
    mkl.keep_mkl_alike()
    assert os.environ.get(mkl.MKL_VARIABLE) == mode
    monkeypatch.setenv(mkl.MKL_VARIABLE, "COMPATIBLE")
    mkl.keep_mkl_alike()
    assert os.environ[mkl.MKL_VARIABLE] == "COMPATIBLE", "the operator's choice stays"


def test_an_operators_cap_under_which_the_probe_crashed_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv(isa.ONEDNN_VARIABLE, "AVX512_CORE_AMX")
    monkeypatch.setattr(subprocess, "run", child({"AVX512_CORE_AMX": -signal.SIGILL, SAFE_CAP: 0}))
    apply_isa(probe_isa(tmp_path))
    assert isa.os.environ[isa.ONEDNN_VARIABLE] == SAFE_CAP


@pytest.mark.parametrize(
    ("cap", "is_left"),
    [
        (None, True),
        ("", True),
        ("DEFAULT", True),
        ("avx512_core_amx", True),
        ("AVX512_CORE_FP16", False),
        ("AVX2", False),
    ],
)
def test_amx_is_had_where_the_cap_leaves_it(monkeypatch, cap, is_left):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
    monkeypatch.delenv(isa.ONEDNN_VARIABLE, raising=False)
    if cap is not None:
        monkeypatch.setenv(isa.ONEDNN_VARIABLE, cap)
    assert isa.has_amx() == is_left
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    assert not isa.has_amx()


@pytest.mark.parametrize(
    ("has_bfloat16", "has_amx", "vendor", "is_fast"),
    [
        (True, True, "GenuineIntel", True),
        (True, False, "GenuineIntel", False),
        (True, False, "AuthenticAMD", True),
        (False, False, "AuthenticAMD", False),
        (True, False, "", False),
    ],
)
def test_fast_is_told_from_the_kind_of_cpu(monkeypatch, has_bfloat16, has_amx, vendor, is_fast):
    monkeypatch.setattr(isa, "has_amx", lambda: has_amx)
    monkeypatch.setattr(isa, "cpu_lines", lambda *fields: f"vendor_id\t: {vendor}" if "vendor_id" in fields else "")
    assert is_bfloat16_fast(CpuIsa(None, has_bfloat16)) == is_fast
