"""The wheel that `pip install .` makes: the services and their data, and none of what only a checkout needs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.environment import plain_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("coordinator", "decode_svc", "gateway", "mixed_svc", "prefill_svc", "tandem")
DATA = (
    "coordinator/store/lua/common.lua",
    "gateway/console/index.html",
    "kernels/defaults/",
    "models/heads/smollm2-135m-instruct-eagle3/model.safetensors",
    *(f"{name}/py.typed" for name in SERVICES),
)
MODULES = (
    "coordinator.main",
    "gateway.main",
    "mixed_svc.core",
    "tandem.cli",
    "tandem.commands.bench_serve",
    "tandem.commands.up",
    "worker.front.serve",
    "worker.main",
)
NOT_IN_IT = ("tests/", "tools/", "testing/", "bench/serving/", "bench/results/", "docs/")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unpacked wheel, built of what git tracks."""
    folder = tmp_path_factory.mktemp("wheel")
    archive = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, archive.decode().split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "bench/results/")):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--wheel-dir", folder, folder / "source"], check=True, timeout=110)
    (file,) = folder.glob("*.whl")
    zipfile.ZipFile(file).extractall(folder / "unpacked")
    return folder / "unpacked"


def test_data_is_in_it_and_what_only_a_checkout_needs_is_not(wheel: Path) -> None:
    names = [str(path.relative_to(wheel)) for path in wheel.rglob("*") if path.is_file()]
    assert [start for start in DATA if not any(name.startswith(start) for name in names)] == []
    assert [name for name in names if name.startswith(NOT_IN_IT)] == []


def test_services_import_nothing_that_it_lacks(wheel: Path) -> None:
    """All that a service imports of ours comes from the wheel, though a checkout may be on the path as well."""
    code = f"""
import importlib, sys
for name in {MODULES!r}:
    importlib.import_module(name)
ours = [m for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").startswith({str(ROOT)!r} + "/")]
print([m.__name__ for m in ours if "/.venv/" not in m.__file__])
"""
    environment = plain_environment() | {"PYTHONPATH": str(wheel)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=wheel, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
