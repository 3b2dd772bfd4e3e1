"""The disk that fails when somebody wants it to: each state does what it says to calls, and leaves the files whole."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.system import faulty_disk
from bench.system.faulty_disk import BROKEN, FULL, READ_ONLY, DiskState, FaultyDisk

pytestmark = pytest.mark.skipif(bool(faulty_disk.missing()), reason=faulty_disk.missing() or "-")

PATIENCE_S = 60.0
CONTENT = os.urandom(737_000)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    with FaultyDisk(tmp_path / "files", tmp_path / "mount") as disk:
        (disk.mount / "a").write_bytes(CONTENT)
        yield disk
    assert not os.path.ismount(disk.mount)


def test_a_healthy_one_passes_everything_on(disk: FaultyDisk) -> None:
    folder = disk.mount / "folder"
    folder.mkdir()
    (folder / "b.part").write_bytes(b"b")
    (folder / "b.part").replace(folder / "b")
    os.utime(folder / "b", (5, 7))
    assert (disk.folder / "a").read_bytes() == (disk.mount / "a").read_bytes() == CONTENT
    assert os.listdir(folder) == ["b"] and (disk.folder / "folder" / "b").stat().st_mtime == 7
    (folder / "b").unlink()
    folder.rmdir()
    assert os.listdir(disk.folder) == ["a"]
    assert os.statvfs(disk.mount).f_bfree > 0


@pytest.mark.parametrize(
    ("state", "can_read", "number"),
    [
        (DiskState(error=BROKEN), False, errno.EIO),
        (DiskState(write_error=FULL), True, errno.ENOSPC),
        (DiskState(write_error=READ_ONLY), True, errno.EROFS),
    ],
)
def test_calls_fail_and_then_do_not(disk: FaultyDisk, state: DiskState, can_read: bool, number: int) -> None:
    with disk.during(state):
        with pytest.raises(OSError) as error:
            (disk.mount / "new").write_bytes(b"")
        assert error.value.errno == number
        assert os.path.isdir(disk.mount) == can_read
        if can_read:
            assert (disk.mount / "a").read_bytes() == CONTENT
    assert os.listdir(disk.mount) == ["a"]


def test_it_is_gone_for_open_files_too_and_comes_back(disk: FaultyDisk) -> None:
    with (disk.mount / "a").open("rb", buffering=0) as file:
        disk.pull_out()
        with pytest.raises(OSError, match=r"not connected|aborted"):
            file.read(1)
        with pytest.raises(OSError, match="not connected"):
            (disk.mount / "a").stat()
    disk.plug_in()
    assert (disk.mount / "a").read_bytes() == CONTENT


def test_a_call_hangs_until_it_is_healthy_again(disk: FaultyDisk) -> None:
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append((disk.mount / "a").read_bytes()), daemon=True)
    with disk.during(DiskState(hangs=True)):
        reader.start()
        reader.join(0.3)
        assert not found
    reader.join(PATIENCE_S)
    assert found == [CONTENT]
