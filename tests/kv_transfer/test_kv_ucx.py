"""UCX passes the same tests as every transport, in processes of their own: a crash in C ends only those."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITES = ["channels", "node", "death", "faults"]


def _run(*args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=280
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("suite", SUITES)
def test_the_suite_passes_over_ucx(suite: str) -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/kv_transfer/test_kv_{suite}.py", "-k", "ucx"]
    result = _run(*command, KV_TEST_TRANSPORTS="ucx")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert " passed" in result.stdout


REPORT = """
from tests.kv_transfer.kv_pair import Peer, offer_and_grant
one, two = Peer("one", transport="ucx"), Peer("two", transport="ucx")
offer_and_grant(one, two, "r", 4, [1])
print(one.node.stats()[0].detail)
one.node.close(), two.node.close()
"""


def test_ucx_names_the_lanes_it_uses() -> None:
    result = _run("-c", REPORT)
    assert result.stdout.startswith("UCX 1.") and "tcp/" in result.stdout, result.stdout + result.stderr


def test_what_the_operator_sets_wins() -> None:
    result = _run("-c", REPORT, UCX_TLS="self,tcp", UCX_NET_DEVICES="lo", UCX_TCP_TX_SEG_SIZE="64k")
    assert "tcp/lo" in result.stdout, result.stdout + result.stderr


def test_no_other_module_needs_ucx() -> None:
    code = "import sys, kv_transfer.node; assert not {'ucxx', 'torch'} & set(sys.modules), 'loaded too early'"
    assert _run("-c", code).returncode == 0
