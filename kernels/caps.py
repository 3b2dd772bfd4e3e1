"""What this process can run on: the device, its compute capability, and which kernel packages are importable."""

import importlib.metadata
import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import torch

Version = tuple[int, ...]


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
    triton_lacks: tuple[str, ...] = ()  # of what it builds each kernel's launcher with

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
        triton_lacks=tuple(_triton_lacks()),
    )
    if kind == "cpu":
        return found
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return replace(found, cc=card.major * 10 + card.minor, name=card.name, sm_count=card.multi_processor_count)


def missing(caps: Caps) -> list[str]:
    """What is absent, one sentence each, for `tandem doctor`."""
    lines = []
    if caps.device == "cpu":
        lines.append("no CUDA device: only the CPU implementations run")
    if caps.triton is None:
        lines.append("triton is not installed: pip install triton")
    elif caps.device == "cuda" and caps.triton_lacks:
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
    lacks = " and ".join(caps.triton_lacks)
    return f"triton can't build its launchers without {lacks}: apt-get install gcc python3-dev, or what is alike here"


def _triton_lacks() -> list[str]:
    """As triton.runtime.build looks for them."""
    compilers = (os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    lacks = {"a C compiler": not any(compilers), "Python's headers (Python.h)": not headers.is_file()}
    return [name for name, is_lacking in lacks.items() if is_lacking]


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
