"""The image of compose.gpu.yaml, as far as no GPU is needed."""

import json

import pytest

from tests.compose.composed import BUILD_TIMEOUT_S, ROOT, docker

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2000)]

IMAGE = "tandem:test-gpu"
PROBE = "from kernels import caps; print(caps.launcher_error() or 'builds')"
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.knobs import compilation

from kernels.triton.norm import argmax_merge_kernel as kernel

compilation.listener = lambda *, cache_hit, **_: print("found" if cache_hit else "compiled")
types = {"best_ptr": "*fp32", "index_ptr": "*i32", "out_ptr": "*i64"}
constants = {"PARTS": 2, "BLOCK": 2, "PDL": False}
signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
named = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
compile(ASTSource(kernel, signature, named), target=GPUTarget("cuda", 90, 32))
"""


@pytest.fixture(scope="module")
def image() -> str:
    file = ROOT / "docker" / "Dockerfile"
    build = ("build", "--quiet", "--build-arg", "EXTRA=gpu", "--file", str(file), "--tag", IMAGE, str(ROOT))
    docker(*build, timeout_s=BUILD_TIMEOUT_S)
    return IMAGE


def run_python(image: str, code: str, *options: str) -> str:
    """Run code as the services run: not as root, and with nothing of the image writable."""
    limits = ("--network=none", "--read-only", "--tmpfs=/tmp:mode=1777,exec", "--cap-drop=ALL")
    return docker("run", "--rm", *limits, *options, "--env=HOME=/tmp", "--entrypoint=python", image, "-c", code).strip()


def test_triton_can_build_its_launchers_there(image: str) -> None:
    """It does so for each kernel at the first start, as the user that the services run as."""
    assert run_python(image, PROBE) == "builds"


def test_what_a_container_compiles_the_next_one_finds(image: str) -> None:
    files = ("--file", str(ROOT / "compose.yaml"), "--file", str(ROOT / "compose.gpu.yaml"))
    services = json.loads(docker("compose", *files, "config", "--format=json"))["services"]
    (name,) = {services[each]["environment"]["TRITON_CACHE_DIR"] for each in ("prefill", "decode")}
    (mounted,) = {v["target"] for v in services["decode"]["volumes"] if v["source"] == "kernels"}
    assert name.startswith(f"{mounted}/")
    volume = docker("volume", "create").strip()
    try:
        kept = (f"--mount=type=volume,source={volume},target={mounted}", f"--env=TRITON_CACHE_DIR={name}")
        assert [run_python(image, COMPILE, *kept) for _ in range(2)] == ["compiled", "found"]
    finally:
        docker("volume", "rm", volume)
