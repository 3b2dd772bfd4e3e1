"""What counts as a fault; and one round over a real system."""

import argparse
import asyncio
from functools import partial
from pathlib import Path

import pytest

from bench.load.client import StreamResult
from bench.serving import chaos, service_faults
from bench.system.services import Services
from tests.e2e.tiny import save_tiny


@pytest.mark.parametrize(
    ("answer", "has_left", "fault"),
    [
        (StreamResult(text="abc"), False, ""),
        (StreamResult(text="ab"), True, ""),
        (StreamResult(text="a\ufffd"), True, ""),  # half a character, shown as it was when the client left
        (StreamResult(text="ab", reason="connection lost"), False, ""),
        (StreamResult(reason="HTTP 503", error="503 lost"), False, ""),
        (StreamResult(text="ab"), False, "wrong answer"),
        (StreamResult(text="abx"), True, "wrong answer"),
        (StreamResult(text="abx", reason="error in the stream"), False, "wrong answer"),
        (StreamResult(text="abc", reason="no finish_reason"), False, "an end without words"),
        (StreamResult(reason="silent"), False, "an end without words"),
    ],
)
def test_what_an_answer_must_never_be(answer, has_left, fault):
    toll = chaos.FaultReport()
    toll.count(answer, "abc", has_left)
    assert dict(toll.faults) == ({fault: 1} if fault else {})
    assert sum(toll.answers.values()) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_round_over_a_real_system_ends_clean(tmp_path: Path):
    args = argparse.Namespace(minutes=0.02, clients=4, seed=5)
    settings = {"TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "16", "TANDEM_MODEL": str(save_tiny(tmp_path))}
    with Services(tmp_path, chaos.workers("tcp", "cpu"), **settings) as services:
        async with asyncio.timeout(240):
            # The other faults are for longer runs.
            toll = await chaos.run(services, {"worker killed": partial(service_faults.kill_front, services)}, args)
    assert toll.faults == {}
    assert toll.num_rests == 1 and toll.done.total() >= 1 and toll.answers["right"] > 0
