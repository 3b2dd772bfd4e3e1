"""Threads that wait must not spin here: tests run beside the processes they started, on few cores.
Inputs are the same in every run, so that a failure comes again; `TEST_SEED=7 make test` takes other ones."""

import functools
import gc
import os
import random
import ssl
import sys
import zlib
from collections.abc import Generator
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from kernels.cpu.mkl import keep_mkl_alike

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is first imported, which is after this

keep_mkl_alike()  # as an engine does, but before a test's own products

# Tests start hundreds of interpreters. Where the environment forbids bytecode on disk each would compile torch and all
# of ours anew: a tiny system takes 14 s of CPU to start then, and 6 with it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Each HTTP client makes one, which reads the certificates of all authorities: 30 ms of CPU. No test speaks TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)

SEED = os.environ.get("TEST_SEED", "")
# No test is of time: a slow machine is no failure.
PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("tandem", derandomize=not SEED, **PATIENT)
hypothesis.settings.load_profile("tandem")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of slow files first, so that no long file is begun when all others have ended."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: there is hardly any, and to look took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave out of later garbage collections what is there for the whole run: modules and thousands of tests.

    To look at all of it takes 0.2 s of CPU, and tests ask for hundreds of collections.
    """
    gc.freeze()


@pytest.fixture
def silent_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Path take every error of a file system for "not there", as it does from Python 3.14 on."""
    for name in ("exists", "is_dir", "is_file"):
        monkeypatch.setattr(Path, name, getattr(os.path, name.replace("is_", "is")))


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    seed = zlib.crc32(f"{SEED}{request.node.nodeid}".encode())
    random.seed(seed)
    np.random.seed(seed)
    if torch := sys.modules.get("torch"):  # not imported for its own sake
        torch.manual_seed(seed)
