"""The image of compose.gpu.yaml, as far as no GPU is needed."""

import pytest

from tests.compose.composed import BUILD_TIMEOUT_S, ROOT, docker

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2000)]

IMAGE = "tandem:test-gpu"
PROBE = "from kernels import caps; print(caps.launcher_error() or 'builds')"


def test_triton_can_build_its_launchers_there() -> None:
    """It does so for each kernel at the first start, as the user that the services run as."""
    file = ROOT / "docker" / "Dockerfile"
    build = ("build", "--quiet", "--build-arg", "EXTRA=gpu", "--file", str(file), "--tag", IMAGE, str(ROOT))
    docker(*build, timeout_s=BUILD_TIMEOUT_S)
    ran = docker("run", "--rm", "--network=none", "--entrypoint=python", "--env=HOME=/tmp", IMAGE, "-c", PROBE)
    assert ran.strip() == "builds"
