"""The seats on the board of cores, which processes take and lose with their lives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from process import core_board
from process.core_board import NUM_SEATS, own_seat, take_seat

TAKE_AND_SAY = """
import sys
from pathlib import Path
from process.core_board import take_seat
print(take_seat(Path(sys.argv[1])).number, flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_leaves_its_seat(tmp_path: Path) -> None:
    own = take_seat(tmp_path)
    command = [sys.executable, "-c", TAKE_AND_SAY, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert (own.number, int(other.stdout.readline())) == (0, 1)
        assert take_seat(tmp_path).number == 2
        other.kill()
    assert take_seat(tmp_path).number == 1


def test_all_processes_have_the_same_page(tmp_path: Path) -> None:
    own, other = take_seat(tmp_path), take_seat(tmp_path)
    own.page[64:68] = b"told"
    assert other.page[64:68] == b"told"
    assert own.num_cores == other.num_cores >= 1


def test_a_board_has_so_many_seats(tmp_path: Path) -> None:
    assert [take_seat(tmp_path).number for _ in range(NUM_SEATS)] == list(range(NUM_SEATS))
    with pytest.raises(OSError, match="seats are taken"):
        take_seat(tmp_path)


def test_those_who_may_use_other_cores_have_another_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_seat(tmp_path).number == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {62, 63})
    assert take_seat(tmp_path).number == 0


def test_the_file_of_another_user_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_seat(tmp_path)
    (file,) = tmp_path.iterdir()
    file.chmod(0o666)
    name = file.name.replace(f"-{os.geteuid()}-", "-12345-")
    file.rename(tmp_path / name)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user's"):
        take_seat(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    take_seat(tmp_path)
    (file,) = tmp_path.iterdir()
    elsewhere = file.rename(tmp_path / "elsewhere")
    file.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic links"):
        take_seat(tmp_path)


def test_where_there_is_no_shared_memory_a_process_shares_with_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_board, "SHARED", tmp_path / "missing")
    own_seat.cache_clear()
    try:
        assert own_seat() is None
    finally:
        own_seat.cache_clear()
