"""Packed matrices in a file that workers share: made once, checked, and done without where it cannot be."""

import logging
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.engine import Engine
from engine.loader import load_engine
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


def test_the_next_worker_maps_what_the_first_has_packed(kept):
    folder, expected = kept
    made = strips_in(folder).stat()
    engine = native_engine(folder)
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert {line.split()[1] for line in lines if str(strips_in(folder)) in line} == {"r--s"}
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
