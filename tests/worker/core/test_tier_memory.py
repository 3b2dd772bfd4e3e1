"""The memory that tiers take at the start: all of it is counted, and what is too much is named."""

from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ConfigError
from worker.core.device_saver import copy_nbytes
from worker.core.fillers import read_nbytes
from worker.core.tier_memory import GIB, require_memory
from worker.settings import WorkerSettings

RECORD = (4 << 20) + 512
"""The bytes of a record in Llama-8B's shape and FP8, about."""
BOTH = {"kv_disk": Path("/kv"), "kv_store": "redis://store/0"}


def settings(**tiers: Any) -> WorkerSettings:
    return WorkerSettings(role="prefill", secret="s", **tiers)  # type: ignore[arg-type]


@pytest.mark.parametrize("tiers", [{"kv_host_gib": 2.0}, BOTH, BOTH | {"kv_host_gib": 2.0}])
def test_a_cpu_takes_the_memory_tier_alone(tiers: dict[str, Any]) -> None:
    assert require_memory(settings(**tiers), RECORD, False, 2 * GIB) == int(tiers.get("kv_host_gib", 0) * GIB)


def test_a_gpu_takes_buffers_for_each_tier_that_is_read() -> None:
    each = read_nbytes(RECORD) + copy_nbytes(RECORD)
    assert 330e6 < read_nbytes(RECORD) < 340e6
    assert require_memory(settings(**BOTH), RECORD, True, 4 * GIB) == 2 * each
    whole = settings(**BOTH, kv_host_gib=1.0)
    assert require_memory(whole, RECORD, True, 4 * GIB) == GIB + 2 * each + copy_nbytes(RECORD)


def test_what_does_not_fit_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"kv_host_gib is 2.0; 1.0 GiB are available: lower it"):
        require_memory(settings(kv_host_gib=2.0), RECORD, False, GIB)
    with pytest.raises(ConfigError, match=r"^kv_disk and kv_store take 0.3\d GiB .* leave out kv_disk or kv_store"):
        require_memory(settings(**BOTH), RECORD, True, GIB // 2)
    words = r"kv_host_gib is 1.0; kv_disk and kv_store take .*: lower kv_host_gib, or leave out kv_disk or kv_store"
    with pytest.raises(ConfigError, match=words):
        require_memory(settings(**BOTH, kv_host_gib=1.0), RECORD, True, GIB)
