"""The build of the native kernels where another process is at it."""

from pathlib import Path

import pytest

from kernels.cpu.build import BuildError, build_into
from kernels.cpu.file_lock import file_lock


def test_a_build_that_never_ends_elsewhere_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.build._LOCK_S", 0.1)
    with file_lock(tmp_path / "lock", 1.0), pytest.raises(BuildError, match="another process holds"):
        build_into(tmp_path, lambda line: None)


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), file_lock(tmp_path / "lock", 1.0):
        raise KeyError
    with file_lock(tmp_path / "lock", 0.0):
        pass
