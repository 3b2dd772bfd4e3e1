"""Packed matrices in a file that workers share: made once, checked, and done without where it cannot be."""

import logging
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.engine import Engine
from engine.loader import load_engine
from kernels.cpu.file_lock import file_lock
from tests.engine.driving import answers, greedy, random_prompts, settings

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(1000, [5, 40])


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def native_engine(cache_dir: Path) -> Engine:
    return load_engine(settings(model="default", dtype="native", cache_dir=cache_dir))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A cache with strips, and what is answered with those that were packed for it."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, answers(native_engine(folder), PROMPTS, greedy())


@pytest.fixture
def cache(kept: tuple[Path, list[list[int]]], tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return Path(shutil.copytree(kept[0], tmp_path / "cache"))


def strips_in(cache_dir: Path) -> Path:
    (file,) = (cache_dir / "native" / "strips").glob("*.strips")
    return file


def is_mapped(file: Path) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[1] for line in lines if str(file) in line} == {"r--s"}


def test_the_next_worker_maps_what_the_first_has_packed(kept):
    folder, expected = kept
    made = strips_in(folder).stat()
    engine = native_engine(folder)
    assert is_mapped(strips_in(folder))
    assert answers(engine, PROMPTS, greedy()) == expected
    assert (strips_in(folder).stat().st_ino, strips_in(folder).stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_file_that_is_damaged_is_made_anew(kept, cache, damage, caplog):
    good = strips_in(kept[0]).read_bytes()
    strips_in(cache).write_bytes(good[:-64] if damage == "cut" else bytes(4096) + good[4096:])
    with caplog.at_level(logging.WARNING):
        engine = native_engine(cache)
    assert "is packed anew" in caplog.text
    assert strips_in(cache).read_bytes() == good
    assert answers(engine, PROMPTS, greedy()) == kept[1]


def test_what_is_of_no_use_any_more_is_removed(cache):
    file = strips_in(cache)
    older, part, own = (file.with_name(name) for name in ("model-0123.strips", "tmp1.part", file.name))
    older.write_bytes(b"left")
    part.mkdir()
    own.unlink()
    native_engine(cache)
    assert sorted(left.name for left in file.parent.iterdir()) == sorted([own.name, "lock"])


def test_models_of_long_ago_are_removed_when_another_is_packed(cache):
    file, month_s = strips_in(cache), 31 * 86400
    used, unused = (file.with_name(f"{name}-{file.stem.rpartition('-')[2]}.strips") for name in ("used", "unused"))
    for other in (used, unused):
        other.write_bytes(b"packed")
    for other in (file, unused):
        os.utime(other, (time.time() - month_s, other.stat().st_mtime))
    native_engine(cache)  # a start with them makes them new again, and removes nothing
    assert file.stat().st_atime > time.time() - month_s / 2 and unused.exists()
    file.unlink()
    native_engine(cache)
    assert sorted(left.name for left in file.parent.glob("*.strips")) == sorted([file.name, used.name])


def test_a_file_in_a_folder_that_cannot_be_written_is_mapped(kept, cache):
    lock = strips_in(cache).with_name("lock")
    lock.unlink()
    lock.mkdir()  # root may write anywhere, but not into a folder
    engine = native_engine(cache)
    assert is_mapped(strips_in(cache))
    assert answers(engine, PROMPTS, greedy()) == kept[1]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_worker_that_never_lets_go_of_the_folder_holds_nobody_up(kept, cache, monkeypatch, caplog, is_there):
    file = strips_in(cache)
    if not is_there:
        file.unlink()
    monkeypatch.setattr("engine.cpu.native.strips._LOCK_S", 0.1)
    with file_lock(file.with_name("lock"), 1.0), caplog.at_level(logging.INFO):
        engine = native_engine(cache)
    assert is_mapped(file) is is_there
    assert ("another process holds" in caplog.text) is not is_there
    assert answers(engine, PROMPTS, greedy()) == kept[1]


def test_where_the_folder_cannot_be_written_each_packs_for_itself(kept, tmp_path, caplog):
    (tmp_path / "native").write_text("a file where the folder should be")
    with caplog.at_level(logging.INFO):
        engine = native_engine(tmp_path)
    assert "not shared with other workers" in caplog.text
    assert answers(engine, PROMPTS, greedy()) == kept[1]


def test_a_disk_with_little_room_is_left_alone(kept, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("engine.cpu.native.strips.shutil.disk_usage", lambda folder: Disk(1 << 30, 1 << 30, 1 << 20))
    with caplog.at_level(logging.INFO):
        engine = native_engine(tmp_path)
    assert "1 MiB free" in caplog.text
    assert [file.name for file in (tmp_path / "native" / "strips").iterdir()] == ["lock"]
    assert answers(engine, PROMPTS, greedy()) == kept[1]


def test_a_pack_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise RuntimeError("stopped on the way")

    monkeypatch.setattr("engine.cpu.native.strips.os.fsync", fail)
    with pytest.raises(RuntimeError, match="on the way"):
        native_engine(tmp_path)
    assert [file.name for file in (tmp_path / "native" / "strips").iterdir()] == ["lock"]
