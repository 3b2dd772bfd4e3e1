"""A GPU is taken whole by one worker; the second one is told what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from worker.core.gpu_claim import claim, claim_gpus
from worker.settings import WorkerSettings

HOLDER = """
import sys
from pathlib import Path
from worker.core.gpu_claim import claim
claim(range(1, 3), lambda index: f"gpu{index}", Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


def uuid_of(index: int) -> str:
    return f"gpu{index}"


def test_a_gpu_that_another_process_took_whole_is_refused_until_it_ends(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "claimed\n"
    for file in claim(range(0, 1), uuid_of, tmp_path):
        os.close(file)
    with pytest.raises(ConfigError, match=r"all that is free of cuda:1: .*TANDEM_DEVICE.*TANDEM_KV_CACHE_MIB"):
        claim(range(0, 2), uuid_of, tmp_path)
    for file in claim(range(0, 1), uuid_of, tmp_path):  # a refusal leaves none of its claims
        os.close(file)
    holder.kill()
    holder.communicate(timeout=60)
    for file in claim(range(0, 3), uuid_of, tmp_path):
        os.close(file)


def test_workers_on_the_cpu_claim_nothing() -> None:
    assert claim_gpus(WorkerSettings.model_validate({"device": "cpu"})) == []
