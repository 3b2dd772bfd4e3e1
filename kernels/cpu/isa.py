"""Which instructions oneDNN may use here: found out once in a child process, remembered in a file."""

import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kernels.cpu.cpuinfo import cpu_lines
from kernels.cpu.mkl import keep_mkl_alike

_log = logging.getLogger(__name__)

ONEDNN_VARIABLE = "ONEDNN_MAX_CPU_ISA"
SAFE_CAP = "AVX512_CORE_FP16"
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CpuIsa:
    """`onednn_cap`: the value of ONEDNN_MAX_CPU_ISA under which bfloat16 matmuls survive.

    None if they do without.

    `has_bfloat16`: whether they can run at all.
    """

    onednn_cap: str | None
    has_bfloat16: bool


def probe_isa(cache_dir: Path) -> CpuIsa:
    """The answer for this CPU and this torch, from `cache_dir` if it is there.

    The first call takes a few seconds.
    """
    file = cache_dir / f"isa-{_machine_key()}.json"
    known = _read(file)
    if known is not None:
        return known
    isa = _probe()
    _log.info("CPU probe: %s", isa)
    _write(file, isa)
    return isa


def apply_isa(isa: CpuIsa) -> None:
    """Cap oneDNN in this process, and have MKL sum alike whatever the number of rows.

    Must come before their first matmul; the environment is the only way to tell either.
    """
    keep_mkl_alike()
    if isa.onednn_cap and isa.onednn_cap != os.environ.get(ONEDNN_VARIABLE):
        _log.warning("bfloat16 matmuls crash on this machine's AMX: capping oneDNN at %s", isa.onednn_cap)
        os.environ[ONEDNN_VARIABLE] = isa.onednn_cap


def has_amx() -> bool:
    """Whether oneDNN may use AMX in this process, as the CPU and its cap stand."""
    cap = (os.environ.get(ONEDNN_VARIABLE) or "DEFAULT").upper()
    return torch.cpu._is_amx_tile_supported() and (cap == "DEFAULT" or "AMX" in cap)


def is_bfloat16_fast(isa: CpuIsa) -> bool:
    """Return whether bfloat16 matmuls of many rows are worth having beside float16 weights.

    `isa` is applied already.

    Judged by the kind of the CPU, never by a clock: both ends of a handoff must come to the same answer, and on a busy
    machine two of them measured two. Rates over float16's: 8 on a Xeon with AMX, 0.6 on the same without it, 2.0 to 2.3
    on a Zen 4.
    """
    return isa.has_bfloat16 and (has_amx() or "AuthenticAMD" in cpu_lines("vendor_id"))


def _machine_key() -> str:
    """Return a key of the CPU, torch, and the cap that the operator has set.

    What is found under one says nothing of another.
    """
    described = cpu_lines("model name", "flags", "Features")
    cap = os.environ.get(ONEDNN_VARIABLE, "")
    facts = f"{described}{platform.machine()}{torch.__version__}{cap}"
    return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()


def _probe() -> CpuIsa:
    for cap in (os.environ.get(ONEDNN_VARIABLE), SAFE_CAP):
        has_bfloat16 = _run_child(cap)
        if has_bfloat16 is not None:
            return CpuIsa(cap, has_bfloat16)
    return CpuIsa(SAFE_CAP, has_bfloat16=False)


def _run_child(cap: str | None) -> bool | None:
    """The child's answer, or None if it died."""
    environment = {**os.environ, ONEDNN_VARIABLE: cap} if cap else dict(os.environ)
    command = [sys.executable, str(Path(__file__).with_name("probe.py"))]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
        return bool(json.loads(done.stdout)["has_bfloat16"]) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        _log.warning("the CPU probe gave no answer: %s", error)
        return None


def _read(file: Path) -> CpuIsa | None:
    try:
        return CpuIsa(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _log.warning("ignoring %s: %s", file, error)
        return None


def _write(file: Path, isa: CpuIsa) -> None:
    """A home that can't be written to costs a probe at each start, nothing else."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(isa)), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        _log.warning("cannot remember the CPU probe in %s: %s", file, error)
