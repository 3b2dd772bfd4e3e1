"""The benchmark of every operation beside its peers, with fractions of the card's limit.

python -m bench.kernels [SECTION ...] [--out FILE]
"""

import argparse
import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.kernels.figure import Figure
from bench.report.result import commit_of
from kernels import caps as capabilities
from kernels import catalog, plans

# Section -> "module:function", in the order in which they run
SECTIONS = {
    "decode_step": "bench.kernels.decode_step_rows:rows",
    "attention": "bench.kernels.operations:attention",
    "prefill": "bench.kernels.operations:prefill",
    "mla": "bench.kernels.operations:mla",
    "skinny": "bench.kernels.operations:skinny",
    "wide": "bench.kernels.operations:wide",
    "four_bit": "bench.kernels.operations:four_bit",
    "experts": "bench.kernels.operations:experts",
    "sampling": "bench.kernels.operations:sampling",
    "elementwise": "bench.kernels.operations:elementwise",
    "move": "bench.kernels.kv_move:rows",
    "compiled": "bench.kernels.torch_compile:rows",
    "autotuned": "bench.kernels.torch_compile:autotuned",
}


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all by default")
    options.add_argument("--out", type=Path, default=Path("kernels.json"))
    args = options.parse_args(argv)
    caps = capabilities.detect()
    if caps.device != "cuda":
        sys.stderr.write("\n".join(["the kernel benchmark needs a GPU", *capabilities.missing(caps)]) + "\n")
        return 2
    registry = catalog.registry(caps)
    rows: list[Figure] = []
    for name in args.sections or SECTIONS:
        started = time.monotonic()
        module, function = SECTIONS[name].split(":")
        rows += getattr(importlib.import_module(module), function)(registry)
        sys.stdout.write(f"-- {name}: {time.monotonic() - started:.0f} s\n")
        write(args.out, rows, caps, args.sections or list(SECTIONS))  # after each section: a late failure loses nothing
    return 0


def write(path: Path, rows: list[Figure], caps: capabilities.Caps, sections: list[str]) -> None:
    versions = {name: ".".join(map(str, getattr(caps, name) or ())) for name in ("torch", "triton", "flashinfer")}
    document: dict[str, Any] = dict(
        what="kernels",
        hardware=caps.name,
        versions=versions,
        commit=commit_of(),
        command=f"python -m bench.kernels {' '.join(sections)}",
        config_digest=plans.source_hash(),
        rows=[asdict(row) for row in rows],
    )
    path.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    sys.exit(main())
