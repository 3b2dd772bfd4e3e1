"""The gateway's benchmark, made small: it measures each thing it says, and its own gateway ends with it."""

import subprocess
import sys

import psutil
import pytest

from bench.serving import gateway

pytestmark = pytest.mark.slow


async def test_a_small_run_measures_everything(monkeypatch):
    small = {"STREAMS": (2,), "PACED_TOKENS": 4, "UNPACED_TOKENS": 10, "MEASURED_TOKENS": 20, "NUM_FIRSTS": 25}
    for name, value in small.items():
        monkeypatch.setattr(gateway, name, value)
    before = psutil.Process().children()
    rows = await gateway._measure()
    assert {row.unit for row in rows} == {"ms", "tokens/s", "cores", "of the asked"}
    assert sum("TTFT" in row.name for row in rows) == 4
    assert [row.peer_value is not None for row in rows].count(True) == 2
    assert {child.pid for child in psutil.Process().children()} <= {child.pid for child in before} | _tracker()


def test_help_measures_nothing():
    command = [sys.executable, "-m", "bench.serving.gateway", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "--out" in done.stdout and not done.stderr


def _tracker() -> set[int]:
    """Multiprocessing's own helper stays until the interpreter ends."""
    children = psutil.Process().children()
    return {child.pid for child in children if "resource_tracker" in " ".join(child.cmdline())}
