"""Show on a device that the self-check takes broken implementations out: python -m tests.kernels.sabotage"""

import sys

from kernels.caps import detect
from kernels.cases import norm_case
from kernels.catalog import IMPLS
from kernels.registry import Impl, Registry
from kernels.selfcheck import check, table
from kernels.specs import NormSpec

BROKEN = ("off_by_a_little", "forgets_a_row", "raises")


def main() -> None:
    caps = detect()
    impls = tuple(
        Impl("add_rmsnorm_quant", name, 50 + i, lambda caps, spec: None, f"tests.kernels.broken:{name}")
        for i, name in enumerate(BROKEN)
    )
    registry, spec = Registry(IMPLS + impls, caps), NormSpec(4096)
    before = registry.resolve("add_rmsnorm_quant", spec).impl.name
    verdicts = check(registry, [norm_case(spec, 33)], caps.device)
    after = registry.resolve("add_rmsnorm_quant", spec)
    sys.stdout.write(f"before: {before}\n{table(verdicts)}\nafter: {after.explain()}\n")


if __name__ == "__main__":
    main()
