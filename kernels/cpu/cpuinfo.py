"""What the kernel says of the CPU."""

from pathlib import Path


def cpu_lines(*fields: str) -> str:
    """Return the lines of /proc/cpuinfo that begin with one of the fields, each once.

    Empty where there is no such file.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(fields)))
