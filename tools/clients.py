"""The check of clients of other projects against a running pair.

    python -m tools.clients [openai anthropic litellm langchain schemathesis]

Installs requirements/clients.lock into build/clients, an environment of their own; for each client starts `tandem up`
with the default model on a free port and runs tests/clients/check_CLIENT.py; prints a table: `make clients`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from pathlib import Path

from bench.system.local_system import running
from tools.separate_environment import install, python_of

ROOT = Path(__file__).resolve().parent.parent
CHECKS = ROOT / "tests" / "clients"
PYTHON = python_of("clients")
PACKAGES = {
    "openai": "openai",
    "anthropic": "anthropic",
    "litellm": "litellm",
    "langchain": "langchain-openai",
    "schemathesis": "schemathesis",
}
"""Client -> the package whose version is shown."""
CLIENT_TIMEOUT_S = 900
CONTEXT = {"schemathesis": "64"}


@dataclass(frozen=True)
class Outcome:
    client: str
    version: str
    num_checks: int
    num_passed: int
    seconds: float

    @property
    def is_good(self) -> bool:
        return 0 < self.num_checks == self.num_passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(PACKAGES)}; all if none is named")
    names = parser.parse_args().clients or list(PACKAGES)
    if unknown := [name for name in names if name not in PACKAGES]:
        parser.error(f"no client is called {', '.join(unknown)}; there are {', '.join(PACKAGES)}")
    install("clients")
    outcomes = []
    for name in names:
        # A fuzzer asks for endless answers, which take long on a CPU; a short context ends them.
        with running("--dtype", "float16", TANDEM_MAX_MODEL_LEN=CONTEXT.get(name, "1024")) as system:
            outcomes.append(check(name, system.url, system.model()))
    print(table(outcomes))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def check(client: str, url: str, model: str) -> Outcome:
    """Run the checks of one client with the Python of the other environment; pytest prints what fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [PYTHON, "-m", "pytest", f"check_{client}.py", "-c", "pytest.ini", f"--junitxml={report}", "-q"]
        environment = os.environ | {
            "TANDEM_CLIENTS_URL": url,
            "TANDEM_CLIENTS_MODEL": model,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it fetches prices when it is imported
        }
        subprocess.run(command, cwd=CHECKS, env=environment, timeout=CLIENT_TIMEOUT_S, check=False)
        suite = xml.parse(report).getroot().find("testsuite")
    assert suite is not None
    total, bad = int(suite.get("tests", 0)), sum(int(suite.get(kind, 0)) for kind in ("failures", "errors", "skipped"))
    return Outcome(client, _version(client), total, total - bad, float(suite.get("time", 0)))


def table(outcomes: list[Outcome]) -> str:
    rows = [
        f"{one.client:14} {one.version:12} {one.num_passed:3} of {one.num_checks:3} {one.seconds:8.1f} s"
        for one in outcomes
    ]
    return "\n".join([f"{'client':14} {'version':12} {'passed':>10} {'took':>10}", *rows])


def _version(client: str) -> str:
    code = f"from importlib.metadata import version; print(version({PACKAGES[client]!r}))"
    return subprocess.run([PYTHON, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
