"""The folders of what sanitizers are built with."""

import pytest

from tools import sanitize


def test_other_flags_have_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {sanitize.home_of(name) for name in sanitize.SANITIZERS}
    monkeypatch.setattr(sanitize, "_FLAGS", ("-O0",))
    folders |= {sanitize.home_of(name) for name in sanitize.SANITIZERS}
    assert len(folders) == 2 * len(sanitize.SANITIZERS)
