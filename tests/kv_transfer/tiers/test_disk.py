"""The tier on a real disk: it outlives the process, holds its limit, and survives what disks do."""

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import Corrupt
from kv_transfer.chunks.block_record import VERSION, verify
from kv_transfer.tiers.disk import RETRY_S, DiskTier
from kv_transfer.tiers.record_files import DIRECT_ALIGNMENT, RecordFiles
from tests.full_disk import small_disk
from tests.kv_transfer.tiers.block_samples import LAYOUT, RECORD_NBYTES, buffers, bytes_of, key_of, record_of, worth_of

ROOM = 100 * RECORD_NBYTES


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def open_tier(folder: Path, nbytes: int = ROOM, clock: Clock | None = None, layout_id: str = "ours") -> DiskTier:
    tier = DiskTier(folder, layout_id, nbytes, clock or Clock())
    tier.wait_until_indexed(30)
    return tier


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"v{VERSION}/*/*/*"))


def store(tier: DiskTier, number: int) -> bool:
    return tier.store(key_of(number), record_of(number), worth_of(number))


def holds(tier: DiskTier, number: int) -> bool:
    """Read it, and verify it."""
    into = buffers(1)
    sizes = tier.load([key_of(number)], into)
    if sizes:
        block = verify(into[0][: sizes[0]], key_of(number), LAYOUT)
        assert np.array_equal(block.payload, bytes_of(number))
    return bool(sizes)


def test_outlives_its_process(tmp_path: Path):
    tier = open_tier(tmp_path)
    assert all(store(tier, number) for number in range(40))
    tier.close()
    again = open_tier(tmp_path)
    assert again.lookup([key_of(number) for number in range(50)]) == 40
    assert all(holds(again, number) for number in range(40))
    into = buffers(40)  # more than are opened ahead
    assert len(again.load([key_of(number) for number in range(40)], into)) == 40
    again.close()


def test_holds_its_limit_also_when_that_is_lowered(tmp_path: Path):
    tier = open_tier(tmp_path, 10 * RECORD_NBYTES)
    for number in range(60):
        store(tier, number)
    tier.close()
    assert 0 < sum(path.stat().st_size for path in files_in(tmp_path)) <= 10 * RECORD_NBYTES
    again = open_tier(tmp_path, 4 * RECORD_NBYTES)
    assert again.stats()["blocks"] == len(files_in(tmp_path)) == 4
    assert again.stats()["bytes"] <= 4 * RECORD_NBYTES
    again.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "zeros", "long"])
def test_what_a_disk_did_to_a_file_is_not_believed(tmp_path: Path, damage: str):
    tier = open_tier(tmp_path)
    store(tier, 1)
    (file,) = files_in(tmp_path)
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 4
    changed = {"cut": data[:-100], "empty": b"", "zeros": bytes(len(data)), "long": data + bytes(9)}.get(damage, data)
    file.write_bytes(changed)
    into = [memoryview(bytearray(RECORD_NBYTES + 64))]
    (nbytes,) = tier.load([key_of(1)], into)
    with pytest.raises(Corrupt):
        verify(into[0][:nbytes], key_of(1), LAYOUT)
    tier.evict([key_of(1)])
    assert not files_in(tmp_path)
    assert store(tier, 1) and holds(tier, 1)
    tier.close()


def test_removes_what_a_writer_that_was_killed_left(tmp_path: Path):
    script = (
        "import os, pathlib, sys; from tests.kv_transfer.tiers.test_disk import *;"
        "tier = open_tier(pathlib.Path(sys.argv[1])); store(tier, 1);"
        "pathlib.Path.replace = lambda *_: os.kill(os.getpid(), 9); store(tier, 2)"
    )
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)
    assert died.returncode == -9
    assert len(files_in(tmp_path)) == 2
    tier = open_tier(tmp_path)
    assert len(files_in(tmp_path)) == 1
    assert holds(tier, 1) and not holds(tier, 2)
    tier.close()


def test_a_full_disk_is_still_read_and_written_again_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with small_disk(tmp_path / "disk") as disk:
        clock = Clock()
        tier = open_tier(disk.folder, clock=clock)
        assert store(tier, 1)
        disk.fill()
        for number in range(2, 9):
            assert not store(tier, number)
            clock.now += RETRY_S
        assert holds(tier, 1)
        assert (tier.is_on, tier.stats()["writable"], tier.stats()["refused_full"]) == (True, 0, 7)
        assert sum("keeps nothing new" in record.message for record in caplog.records) == 1
        disk.clear()
        clock.now += RETRY_S
        assert store(tier, 4) and holds(tier, 4)
        assert not list(disk.folder.rglob("*.part"))
        tier.close()


def test_a_disk_that_became_read_only_is_still_read(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with small_disk(tmp_path / "disk") as disk:
        tier = open_tier(disk.folder)
        assert store(tier, 1)
        tier_files = disk.folder / f"v{VERSION}"
        subprocess.run(["mount", "--bind", str(tier_files), str(tier_files)], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(tier_files)], check=True)
        try:
            assert not store(tier, 2)
            assert holds(tier, 1)
            assert tier.stats()["refused_unwritable"] == 1
            assert "Read-only file system" in caplog.text
        finally:
            subprocess.run(["umount", str(tier_files)], check=True)
        tier.close()


def test_a_folder_that_vanishes_turns_it_off_until_it_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    clock, folder, elsewhere = Clock(), tmp_path / "kv", tmp_path / "elsewhere"
    tier = open_tier(folder, clock=clock)
    assert store(tier, 1)
    folder.rename(elsewhere)
    assert not holds(tier, 1)
    assert not tier.is_on and tier.lookup([key_of(1)]) == 0
    assert not store(tier, 2)
    assert sum("is off" in record.message for record in caplog.records) == 1
    elsewhere.rename(folder)
    clock.now += RETRY_S
    store(tier, 2)  # looks at the folder again
    tier.wait_until_indexed(30)
    assert tier.is_on and holds(tier, 1)
    tier.close()


def test_writers_of_one_name_take_folders_by_number_and_find_them_again(tmp_path: Path) -> None:
    def opened() -> DiskTier:
        tier = DiskTier(tmp_path / "decode", "ours", ROOM, Clock(), num_folders=2)
        tier.wait_until_indexed(30)
        return tier

    first, second, third = opened(), opened(), opened()
    assert store(first, 1) and store(second, 2) and not third.is_on
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode", "decode.2"]
    second.close()
    again = opened()
    assert holds(again, 2) and not holds(again, 1)
    first.close()
    again.close()
    again = opened()
    assert holds(again, 1)
    for tier in (third, again):
        tier.close()


def test_a_second_writer_is_off_until_the_first_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    clock = Clock()
    first, second = open_tier(tmp_path), open_tier(tmp_path, clock=clock)
    assert store(first, 1)
    assert not second.is_on and not store(second, 2)
    assert "another process uses it" in caplog.text
    first.close()
    clock.now += RETRY_S
    store(second, 2)
    second.wait_until_indexed(30)
    assert second.is_on and holds(second, 1)
    second.close()


def test_a_folder_that_can_t_be_made_is_no_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    tier = open_tier(tmp_path / "file")
    assert not tier.is_on and not store(tier, 1)
    tier.close()


def test_blocks_of_another_layout_are_named_once_and_have_only_the_room_that_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    other = open_tier(tmp_path, layout_id="other")
    for number in range(8):
        store(other, number)
    other.close()
    (tmp_path / "notes").mkdir()
    tier = open_tier(tmp_path, 8 * RECORD_NBYTES)
    assert tier.stats()["foreign_blocks"] == 8
    assert sum("another model, number format, block size or release" in each.message for each in caplog.records) == 1
    assert sum("does not use, and does not count: notes" in record.message for record in caplog.records) == 1
    for number in range(100, 108):
        store(tier, number)
        assert len(files_in(tmp_path)) <= 8
    assert tier.stats()["foreign_blocks"] == 0
    assert all(holds(tier, number) for number in range(100, 108))
    tier.close()


def test_records_of_former_releases_and_layouts_go_the_longest_unused_first_whatever_they_are(tmp_path: Path):
    """Here of a smaller limit, and of a release whose names say nothing any more."""
    other = open_tier(tmp_path, layout_id="other")
    for number in range(4):
        store(other, number)
    other.close()
    (tmp_path / f"v{VERSION}").rename(tmp_path / "v1")
    files = sorted(tmp_path.glob("v1/*/*/*"))
    for age, path in enumerate(files):
        os.utime(path.rename(path.with_name(f"block-{age}")), (1e9 + age, 1e9 + age))
    mine = open_tier(tmp_path)
    assert store(mine, 10)
    mine.close()
    again = open_tier(tmp_path, 3 * RECORD_NBYTES)
    assert again.stats()["foreign_blocks"] == 2 and holds(again, 10)
    assert {path.name for path in tmp_path.glob("v1/*/*/*")} == {"block-2", "block-3"}
    again.close()


def test_a_removal_that_fails_keeps_its_room_and_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Others go for a foreign file; where all are its own, nothing is written until there is room."""
    store_foreign(tmp_path, 4)
    clock = Clock()
    tier = open_tier(tmp_path, 4 * RECORD_NBYTES, clock)
    remove, faults = RecordFiles.remove, [OSError(errno.EIO, "a bad sector"), OSError(errno.EIO, "another")]

    def fail(files: RecordFiles, place: str) -> None:
        if faults:
            raise faults.pop()
        remove(files, place)

    monkeypatch.setattr(RecordFiles, "remove", fail)
    for number in range(10, 16):
        assert store(tier, number) and len(files_in(tmp_path)) <= 4
    assert tier.stats()["blocks"] == 2 and len(files_in(tmp_path)) == 4
    clock.now += RETRY_S
    for number in range(16, 20):
        assert store(tier, number) and len(files_in(tmp_path)) <= 4
    assert tier.stats()["blocks"] == len(files_in(tmp_path)) == 4
    faults.append(OSError(errno.EIO, "of a record that had to go"))
    assert not store(tier, 20) and len(files_in(tmp_path)) == 4 and not store(tier, 21)
    clock.now += RETRY_S
    assert store(tier, 21) and len(files_in(tmp_path)) == 4
    faults.append(OSError(errno.EIO, "of a record that is faulty"))
    tier.evict([key_of(21)])
    assert len(files_in(tmp_path)) == 4
    assert store(tier, 22) and store(tier, 23)
    assert tier.stats()["blocks"] == len(files_in(tmp_path)) == 4
    tier.close()


def store_foreign(folder: Path, count: int) -> None:
    other = open_tier(folder, layout_id="other")
    assert all(store(other, number) for number in range(count))
    other.close()


def hold_on_to(monkeypatch: pytest.MonkeyPatch, stays: str) -> None:
    """Let no file whose name begins with this be removed."""
    remove = RecordFiles.remove

    def refuse(files: RecordFiles, place: str) -> None:
        if Path(place).name.startswith(stays):
            raise PermissionError(errno.EPERM, "not ours", place)
        remove(files, place)

    monkeypatch.setattr(RecordFiles, "remove", refuse)


@pytest.mark.parametrize("is_foreign", [True, False])
def test_a_file_that_can_never_be_removed_stops_no_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_foreign: bool
):
    if is_foreign:
        store_foreign(tmp_path, 4)
    clock = Clock()
    tier = open_tier(tmp_path, 4 * RECORD_NBYTES, clock)
    assert is_foreign or all(store(tier, number) for number in range(4))
    hold_on_to(monkeypatch, "")
    assert not store(tier, 10)
    monkeypatch.undo()
    stays = Path(next(iter(tier._stuck))).name
    hold_on_to(monkeypatch, stays)
    clock.now += RETRY_S
    num_stored = 0
    for number in range(11, 31):
        num_stored += store(tier, number)
        clock.now += RETRY_S
        assert len(files_in(tmp_path)) <= 4
    assert num_stored >= 19 and tier.stats()["writable"]
    assert stays in {path.name for path in files_in(tmp_path)}
    tier.close()
    again = open_tier(tmp_path, 3 * RECORD_NBYTES, clock)
    assert again.is_on
    for number in range(40, 44):
        num_stored += store(again, number)
        clock.now += RETRY_S
    assert num_stored >= 22 and len(files_in(tmp_path)) <= 3
    again.close()


def test_a_removal_that_fails_while_the_folder_is_indexed_anew_costs_no_file_of_that_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock()
    tier = open_tier(tmp_path, 4 * RECORD_NBYTES, clock)
    assert all(store(tier, number) for number in range(4))
    remove, places = RecordFiles.remove, list[str]()

    def index_and_fail(files: RecordFiles, place: str) -> None:
        places.append(place)
        tier._unreadable = "a read failed"
        clock.now += RETRY_S
        assert tier.lookup([key_of(0)]) == 0 and tier.wait_until_indexed(30)
        raise OSError(errno.EIO, "a bad sector")

    monkeypatch.setattr(RecordFiles, "remove", index_and_fail)
    assert not store(tier, 10)
    monkeypatch.setattr(RecordFiles, "remove", remove)
    assert tier.stats()["blocks"] == len(files_in(tmp_path)) == 4
    tier.evict([next(key_of(number) for number in range(4) if not places[0].count(key_of(number).hex()))])
    clock.now += RETRY_S
    assert store(tier, 11)
    assert tier.stats()["blocks"] == len(files_in(tmp_path)) == 4
    tier.close()


@pytest.mark.parametrize("is_before", [True, False])
def test_no_file_is_left_uncounted_by_an_index_that_is_made_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool
):
    clock, write = Clock(), RecordFiles.write
    tier = open_tier(tmp_path, clock=clock)
    assert store(tier, 1)

    def index_and_write(files: RecordFiles, place: str, record: memoryview) -> None:
        if not is_before:
            write(files, place, record)
        tier._unreadable = "a read failed"
        clock.now += RETRY_S
        assert tier.lookup([key_of(1)]) == 0 and tier.wait_until_indexed(30)
        if is_before:
            write(files, place, record)

    with monkeypatch.context() as patched:
        patched.setattr(RecordFiles, "write", index_and_write)
        assert not store(tier, 2)
    assert tier.stats()["blocks"] == len(files_in(tmp_path)) == 1
    assert store(tier, 2) and holds(tier, 1) and holds(tier, 2)
    tier.close()


def test_a_folder_that_can_not_be_indexed_turns_it_off_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    clock = Clock()
    with monkeypatch.context() as patched:
        patched.setattr(RecordFiles, "scan", lambda _: 1 / 0)
        tier = open_tier(tmp_path, clock=clock)
    assert not tier.is_on and not store(tier, 1)
    assert "is off" in caplog.text and "division by zero" in caplog.text
    clock.now += RETRY_S
    store(tier, 1)  # looks at the folder again
    tier.wait_until_indexed(30)
    assert store(tier, 2) and holds(tier, 2)
    tier.close()


def test_a_file_that_somebody_removed_is_a_miss(tmp_path: Path):
    tier = open_tier(tmp_path)
    assert store(tier, 1) and store(tier, 2)
    next(path for path in files_in(tmp_path) if path.name.startswith(key_of(1).hex())).unlink()
    assert not holds(tier, 1)
    assert tier.is_on and holds(tier, 2) and tier.lookup([key_of(1)]) == 0
    tier.close()


def test_a_file_that_is_missing_behind_others_is_the_one_that_is_forgotten(tmp_path: Path):
    """It is opened ahead of those before it, which are good, and read and kept all the same."""
    tier, keys = open_tier(tmp_path), [key_of(number) for number in range(8)]
    assert all(store(tier, number) for number in range(8))
    next(path for path in files_in(tmp_path) if path.name.startswith(key_of(5).hex())).unlink()
    assert len(tier.load(keys, buffers(8))) == 5
    assert tier.is_on and tier.lookup(keys) == 5 and len(files_in(tmp_path)) == 7
    assert store(tier, 5)
    assert len(tier.load(keys, buffers(8))) == 8
    tier.close()


def test_the_size_of_a_file_is_limited(tmp_path: Path):
    """RLIMIT_FSIZE stands for a quota: writing fails in the middle of a record."""
    script = (
        "import pathlib, resource, signal, sys; from tests.kv_transfer.tiers.test_disk import *;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); tier = open_tier(pathlib.Path(sys.argv[1]));"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        "assert not store(tier, 1) and tier.stats()['refused_full'] == 1"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=True)
    assert not files_in(tmp_path)


def test_a_disk_that_is_read_past_the_page_cache_gives_the_same(tmp_path: Path):
    """Into buffers that are aligned as such a read wants them; and where the file system can't, as from any disk."""
    tier = DiskTier(tmp_path, LAYOUT.shared_id.hex(), ROOM, is_direct=True)
    assert tier.wait_until_indexed(30)
    for number in range(3):
        assert tier.store(key_of(number), record_of(number), worth_of(number))
    size = -(-RECORD_NBYTES // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
    memory = memoryview(mmap.mmap(-1, 3 * size))
    into = [memory[start : start + size] for start in range(0, 3 * size, size)]
    sizes = tier.load([key_of(number) for number in range(3)], into)
    assert [bytes(record[:nbytes]) for record, nbytes in zip(into, sizes, strict=True)] == [
        bytes(record_of(number)) for number in range(3)
    ]
    tier.close()
