"""Environments of their own below build/, for packages that stay out of the services' one.

python -m tools.separate_environment clients|deploy    installs requirements/NAME.lock into build/NAME
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python_of(name: str) -> Path:
    """Return the interpreter of the environment `name`."""
    return ROOT / "build" / name / "bin" / "python"


def install(name: str) -> None:
    """Install what requirements/NAME.lock says, unless it is there already.

    The other environment has no pip; ours installs into it. Raises CalledProcessError if that fails.
    """
    lock, folder = ROOT / "requirements" / f"{name}.lock", ROOT / "build" / name
    stamp = folder / "installed.lock"
    if stamp.exists() and stamp.read_bytes() == lock.read_bytes():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python_of(name)), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", str(lock)], check=True)
    stamp.write_bytes(lock.read_bytes())


if __name__ == "__main__":
    install(sys.argv[1])
