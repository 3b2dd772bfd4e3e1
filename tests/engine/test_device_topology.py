"""Which way is said to join two GPUs, from what the driver's library answers. No GPU."""

import pynvml
import pytest

from engine.cuda.kv import peer_pool as remote
from engine.cuda.runtime import topology


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], int]:
    """Return what NVML says of NVLink by pair of names; it knows no other GPU."""
    said: dict[tuple[str, str], int] = {}

    def handle(uuid: str) -> str:
        if not any(uuid in pair for pair in said):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def status(one: str, other: str, index: int) -> int:
        assert index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        return said[one, other]

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", status)
    return said


def test_two_gpus_are_joined_by_nvlink_or_by_pcie_or_nobody_knows(library):
    library["GPU-a", "GPU-b"] = pynvml.NVML_P2P_STATUS_OK
    library["GPU-a", "GPU-c"] = pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
    assert [topology.joined_by("a", name) for name in "bcd"] == ["NVLink", "PCIe", ""]


def test_without_the_drivers_library_nobody_knows(monkeypatch):
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert topology.joined_by("a", "b") == ""


def test_a_link_says_which_way_it_goes_and_warns_of_one_that_is_slow(library, caplog):
    library["GPU-a", "GPU-b"] = pynvml.NVML_P2P_STATUS_OK
    library["GPU-a", "GPU-c"] = pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
    ways = [remote.way_between("a", name) for name in "abd"]
    assert ways == ["on one GPU", "between two GPUs by NVLink", "between two GPUs"] and not caplog.records
    assert remote.way_between("a", "c") == "between two GPUs by PCIe"
    assert "no NVLink joins this GPU and the peer's" in caplog.text
