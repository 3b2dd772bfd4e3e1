"""The command that runs benchmarks one after the other.

Without names it runs all that need no GPU; `python -m MODULE --help` shows the options of one.
"""

import argparse
import subprocess
import sys
from importlib.util import find_spec

ALL = {
    "engine": "bench.engine.cpu",
    "native": "bench.engine.native",
    "worker_start": "bench.engine.start",
    "agreement": "bench.engine.agreement",
    "kv_tiers": "bench.engine.kv_tiers",
    "speculation": "bench.engine.speculation",
    "drafted_answers": "bench.engine.drafted_answers",
    "pair_agreement": "bench.serving.pair_agreement",
    "transfer": "bench.handoff.transports",
    "serving": "bench.serving.cpu_pair",
    "slow_network": "bench.serving.slow_network",
    "gateway": "bench.serving.gateway",
    "structured": "bench.serving.structured_outputs",
    "soak": "bench.serving.soak",
    "migration": "bench.serving.migration",
    "fairness": "bench.serving.fairness",
    "roles": "bench.serving.role_changes",
    "chaos": "bench.serving.chaos",
}
"""Name of a benchmark -> its module, in the order in which all of them run."""


def main(arguments: list[str]) -> int:
    """Run each benchmark in a process of its own, free of another's threads and caches; stop at a failure."""
    parser = argparse.ArgumentParser("python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    names = parser.parse_args(arguments).names
    if unknown := [name for name in names if name not in ALL]:
        print(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(ALL)}", file=sys.stderr)
        return 2
    if any(find_spec(ALL[name].rpartition(".")[0]) is None for name in names or ALL):
        print("this needs a checkout of the repository; installed, there is `tandem bench serve`", file=sys.stderr)
        return 2
    for name in names or ALL:
        print(f"== {name}", flush=True)
        if code := subprocess.run([sys.executable, "-m", ALL[name]], check=False).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
