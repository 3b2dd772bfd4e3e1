"""Pin every dependency with its digests: `make lock`. Needs `uv`; writes requirements/*.lock.

    run.lock    what the services import, without torch
    torch.lock  torch and the CUDA libraries that its PyPI wheel stands on
    gpu.lock    kernels for NVIDIA GPUs
    otel.lock   traces by OpenTelemetry
    dev.lock    what checks, tests and documentation add

and clients.lock from clients.in: clients of other projects, for `make clients`; compiler.lock from compiler.in: a
compiler for the native kernels, for systems that have none; deploy.lock from deploy.in: what judges the Helm chart

One resolution for all of them, split afterwards: together they never disagree, and a container image can keep the
large, rarely changing torch layer apart from the rest.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "requirements"
HEADER = "# Made by `make lock` from pyproject.toml. Install with `pip install --no-deps --require-hashes -r`.\n"
DEMO = ("--group", "pyproject.toml:demo")
CUDA = [
    "cuda-toolkit",
    "nvidia-cudnn-cu13",
    "nvidia-cusparselt-cu13",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu13",
    "triton",
]

Entries = dict[str, list[str]]
"""Package name -> its lines; more than one where versions differ between Pythons."""


def main() -> None:
    everything = compile_extras("--all-extras", *DEMO, "--generate-hashes")
    run = compile_extras(*DEMO)
    lean = compile_extras(*DEMO, override=[f"{name}; sys_platform == 'never'" for name in CUDA])
    torch = (run.keys() - lean.keys()) | {"torch"}
    extras = {name: compile_extras("--extra", name).keys() - run.keys() for name in ("gpu", "otel", "dev")}
    groups = {"run": run.keys() - torch, "torch": torch, **extras}
    OUT.mkdir(exist_ok=True)
    for group, names in groups.items():
        lines = [line for name in sorted(names) for line in everything[name]]
        (OUT / f"{group}.lock").write_text(HEADER + "".join(lines))
        print(f"{group}.lock: {len(names)} packages")
    for name in ("clients", "compiler", "deploy"):
        lock_apart(name)


def lock_apart(name: str) -> None:
    """Lock packages that have an environment of their own.

    Of the clients, litellm and LangChain want another major version of openai than our tests.
    """
    entries = compile_extras("--generate-hashes", source=f"requirements/{name}.in")
    (OUT / f"{name}.lock").write_text(HEADER + "".join(line for name in sorted(entries) for line in entries[name]))
    print(f"{name}.lock: {len(entries)} packages")


def compile_extras(*options: str, override: list[str] | None = None, source: str = "pyproject.toml") -> Entries:
    command = ["uv", "pip", "compile", "--universal", "--python-version", "3.11", "--no-annotate", "--no-header", "-q"]
    if override:
        overrides = OUT / ".overrides.txt"
        overrides.write_text("\n".join(override))
        command += ["--override", str(overrides)]
    done = subprocess.run([*command, *options, source], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if override:
        overrides.unlink()
    if done.returncode:
        sys.exit(done.returncode)
    return parse(done.stdout)


def parse(text: str) -> Entries:
    """Return requirement lines and their indented continuation lines, by package name."""
    entries: Entries = {}
    for match in re.finditer(r"^([A-Za-z0-9._-]+)==.*\n(?:[ \t].*\n)*", text, re.MULTILINE):
        entries.setdefault(match[1], []).append(match[0])
    return entries


if __name__ == "__main__":
    main()
