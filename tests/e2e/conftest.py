"""Whole systems for the tests: real processes, real Redis, real sockets; one with the real model."""

from collections.abc import Iterator

import pytest

from bench.system.local_system import System, running


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    """The default model on one prefill and one decode worker, in the format that users have without asking."""
    with running(TANDEM_NUM_THREADS="1", TANDEM_KV_CACHE_MIB="512", TANDEM_MAX_BATCHED_TOKENS="128") as system:
        yield system
