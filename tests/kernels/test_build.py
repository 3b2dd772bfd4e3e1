"""The build of the native kernels: where another process is at it, and by a compiler that knows less."""

import platform
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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86")
@pytest.mark.parametrize("has_tiles", [True, False])
def test_a_compiler_that_knows_no_amx_builds_the_rest(
    has_tiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, said = tmp_path / "compiler", tmp_path / "said"
    refusal = "" if has_tiles else 'case "$*" in *-mamx*) echo "error: unknown option" >&2; exit 1;; esac'
    compiler.write_text(f"""#!/bin/sh
{refusal}
echo "$@" >>{said}
while [ $# -gt 1 ]; do [ "$1" != -o ] || touch "$2"; shift; done
""")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build_into(tmp_path / "built", lambda line: None).exists()
    commands = said.read_text().splitlines()
    assert sum("library.cpp" in command for command in commands) == 1
    assert any("tile_probe.cpp" in command for command in commands) == has_tiles
    assert any("library.cpp" in command and "-DTANDEM_NO_TILES" in command for command in commands) != has_tiles
    assert any("-DTANDEM_SET=avx512" in command for command in commands)
