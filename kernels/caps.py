"""The capabilities of this process.

The device, its compute capability, and which kernel packages are importable.
"""

import importlib.metadata
import importlib.util
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import torch

Version = tuple[int, ...]
_LAUNCHER = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tandem_probe", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_tandem_probe(void) { return PyModule_Create(&module); }
"""


@dataclass(frozen=True)
class Caps:
    """Capabilities that selection depends on; plain data, so that tests can invent a Blackwell."""

    device: str  # "cpu" or "cuda"
    cc: int = 0  # 90, 100, 103, 120; 0 without a GPU
    name: str = "cpu"
    sm_count: int = 0
    torch: Version = ()
    triton: Version | None = None
    flashinfer: Version | None = None
    flashinfer_jit: bool = False  # nvcc is here, or prebuilt modules are
    flashinfer_cubins: bool = False  # the trtllm-gen kernels of sm_100 are here
    triton_error: str = ""  # why it can't build the launchers of its kernels

    @property
    def hopper(self) -> bool:
        return self.cc == 90

    @property
    def blackwell(self) -> bool:
        return self.cc >= 100


def detect(device: str | None = None) -> Caps:
    """Look at this process once; `device` forces "cpu" on a machine that has a GPU."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = Caps(
        kind,
        torch=_version("torch") or (),
        triton=_version("triton"),
        flashinfer=_version("flashinfer", "flashinfer-python"),
        flashinfer_jit=shutil.which("nvcc") is not None or _has_prebuilt(),
        flashinfer_cubins=importlib.util.find_spec("flashinfer_cubin") is not None,
    )
    if kind == "cpu":
        return found
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts = dict(cc=card.major * 10 + card.minor, name=card.name, sm_count=card.multi_processor_count)
    return replace(found, **facts, triton_error=launcher_error() if found.triton else "")


def missing(caps: Caps) -> list[str]:
    """What is absent, one sentence each, for `tandem doctor`."""
    lines = []
    if caps.device == "cpu":
        lines.append("no CUDA device: only the CPU implementations run")
    if caps.triton is None:
        lines.append("triton is not installed: pip install triton")
    elif caps.triton_error:
        lines.append(unbuildable(caps))
    if caps.flashinfer is None:
        lines.append("flashinfer is not installed: pip install flashinfer-python==0.6.13 (optional)")
    elif not caps.flashinfer_jit:
        lines.append("flashinfer cannot compile: nvcc is not on the PATH and no prebuilt modules were found")
    if caps.blackwell and caps.flashinfer and not caps.flashinfer_cubins:
        lines.append("flashinfer-cubin is not installed: the trtllm-gen kernels are out of reach")
    return lines


def unbuildable(caps: Caps) -> str:
    """Why no kernel of Triton's can be launched, and what to do."""
    todo = "apt-get install gcc python3-dev, or what has a C compiler and Python.h here"
    return f"triton can't build the launchers of its kernels ({caps.triton_error}): {todo}"


def launcher_error() -> str:
    """Why Triton can't build a kernel's launcher in this process, found by building what is like it.

    Else empty. What it has built once is in its cache.
    """
    from triton.runtime.build import compile_module_from_src

    try:
        compile_module_from_src(_LAUNCHER, "tandem_probe")
    except subprocess.CalledProcessError as error:
        return f"{Path(error.cmd[0]).name} ended with {error.returncode}"
    except Exception as error:  # its builder may be the user's own (triton.knobs)
        return f"{type(error).__name__}: {error}"
    return ""


def _version(module: str, distribution: str | None = None) -> Version | None:
    if importlib.util.find_spec(module) is None:
        return None
    try:
        text = importlib.metadata.version(distribution or module)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())


def _has_prebuilt() -> bool:
    """FlashInfer's own, in a package beside it or in itself."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    spec = importlib.util.find_spec("flashinfer")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return any((Path(root) / "data" / "aot").is_dir() for root in roots)
