"""The image of compose.gpu.yaml, as far as no GPU is needed."""

import pytest

from tests.compose.composed import BUILD_TIMEOUT_S, ROOT, docker

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2000)]

IMAGE = "tandem:test-gpu"
BUILD_ONE = """
from kernels import caps
from triton.runtime.build import compile_module_from_src

assert not caps.detect("cpu").triton_lacks, caps.detect("cpu").triton_lacks
source = '''
#include <Python.h>
static struct PyModuleDef probe = {PyModuleDef_HEAD_INIT, "probe", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&probe); }
'''
print(compile_module_from_src(source, "probe").__name__)
"""


def test_triton_can_build_its_launchers_there() -> None:
    """It does so for each kernel at the first start, as the user that the services run as."""
    file = ROOT / "docker" / "Dockerfile"
    build = ("build", "--quiet", "--build-arg", "EXTRA=gpu", "--file", str(file), "--tag", IMAGE, str(ROOT))
    docker(*build, timeout_s=BUILD_TIMEOUT_S)
    ran = docker("run", "--rm", "--network=none", "--entrypoint=python", "--env=HOME=/tmp", IMAGE, "-c", BUILD_ONE)
    assert ran.strip() == "probe"
