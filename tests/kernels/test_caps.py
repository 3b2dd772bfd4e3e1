"""What is found on a machine, and what is said to be missing."""

import importlib.metadata
import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import caps

FULL: dict[str, Any] = dict(torch=(2, 11, 0), triton=(3, 6, 0), flashinfer=(0, 6, 13), flashinfer_jit=True)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (caps.Caps("cpu"), "no CUDA device"),
        (caps.Caps("cuda", 90, torch=(2, 11, 0)), "pip install triton"),
        (caps.Caps("cuda", 90, **FULL, triton_error="no compiler"), "(no compiler): apt-get install gcc python3-dev"),
        (caps.Caps("cuda", 90, **{**FULL, "flashinfer": None}), "pip install flashinfer-python==0.6.13"),
        (caps.Caps("cuda", 90, **{**FULL, "flashinfer_jit": False}), "nvcc is not on the PATH"),
        (caps.Caps("cuda", 100, **FULL), "flashinfer-cubin is not installed"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_in_words(found, words):
    assert any(words in line for line in caps.missing(found))


def test_a_complete_hopper_misses_nothing():
    assert caps.missing(caps.Caps("cuda", 90, **FULL)) == []


needs_compiler = pytest.mark.skipif(
    not (shutil.which("gcc") or shutil.which("clang")) or not Path(sysconfig.get_path("include"), "Python.h").is_file(),
    reason="no C compiler here, or no Python.h",
)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Use a cache in which nothing was built yet."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@needs_compiler
def test_whether_triton_can_build_launchers_is_found_by_building_one(cache, monkeypatch):
    assert caps.launcher_error() == ""
    monkeypatch.setenv("PATH", "")
    assert caps.launcher_error() == "", "it is in the cache"


@pytest.mark.parametrize(
    ("compiler", "error"), [pytest.param("", "", marks=needs_compiler), ("/bin/false", "false ended with 1")]
)
def test_a_card_is_looked_at_and_so_is_what_its_kernels_need(cache, monkeypatch, compiler, error):
    if compiler:
        monkeypatch.setenv("CC", compiler)
    card = SimpleNamespace(major=9, minor=0, name="an H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    found = caps.detect("cuda")
    assert (found.device, found.cc, found.name, found.sm_count) == ("cuda", 90, "an H200", 132)
    assert found.triton_error == error


def test_without_a_compiler_or_with_one_that_fails_it_is_said_why_it_cannot(cache, monkeypatch):
    monkeypatch.setenv("CC", "/bin/false")
    assert caps.launcher_error() == "false ended with 1"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert "Failed to find C compiler" in caps.launcher_error()


@pytest.mark.parametrize("package", ["flashinfer", "flashinfer_jit_cache"])
def test_prebuilt_modules_are_flashinfers_own_or_in_a_package_beside_it(monkeypatch, tmp_path, package):
    folder = tmp_path / package
    (folder / "data/aot").mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert caps.detect("cpu").flashinfer_jit
    (folder / "data/aot").rmdir()
    assert caps.detect("cpu").flashinfer_jit == (package == "flashinfer_jit_cache")


@pytest.mark.parametrize(("cc", "hopper", "blackwell"), [(89, False, False), (90, True, False), (103, False, True)])
def test_generations_by_capability(cc, hopper, blackwell):
    found = caps.Caps("cuda", cc)
    assert (found.hopper, found.blackwell) == (hopper, blackwell)


@pytest.mark.parametrize(
    ("text", "want"), [("2.11.0+cu130", (2, 11, 0)), ("0.6.18.post1", (0, 6, 18)), ("3.6", (3, 6))]
)
def test_versions_are_numbers(monkeypatch, text, want):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: text)
    assert caps._version("anything") == want


def test_a_module_without_metadata_is_there_in_no_version(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert caps._version("anything") == ()
