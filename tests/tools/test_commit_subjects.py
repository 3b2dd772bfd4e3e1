"""The check of commit subjects, on subjects and on real commits."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.commit_subjects import fault

PROGRAM = Path(__file__).parents[2] / "tools" / "commit_subjects.py"


@pytest.mark.parametrize(
    "subject",
    [
        "kv_transfer: drain an abort that meets a commit halfway",
        "engine/cuda: take the scale once",
        "gateway, docs: name the field that is refused",
        ".github: run make in the workflow",
        "Revert \"Gateway: this and that.\"",
        "docs: " + "x" * 66,
    ],
)  # fmt: skip
def test_a_good_subject(subject: str) -> None:
    assert fault(subject) is None


@pytest.mark.parametrize(
    ("subject", "word"),
    [
        ("Mend the gateway", "area"),
        ("Gateway: mend it", "area"),
        ("gateway:mend it", "area"),
        ("gateway: ", "area"),
        ("", "area"),
        ("docs: mend it.", "full stop"),
        ("docs: " + "x" * 67, "73 characters"),
    ],
)
def test_a_subject_that_is_refused(subject: str, word: str) -> None:
    assert word in (fault(subject) or "")


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PROGRAM), *arguments], cwd=cwd, capture_output=True, text=True)


def test_every_commit_of_a_range_is_looked_at(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for subject in ("docs: begin", "docs: go on", "Went on"):
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", subject], check=True)
    assert run("HEAD~2..HEAD~1", cwd=tmp_path).returncode == 0
    done = run("HEAD~2..HEAD", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout.startswith("'Went on' is not")


def test_a_message_is_read_from_a_file(tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text("docs: say it\n\nWhy.\n")
    assert run("--message", str(message), cwd=tmp_path).returncode == 0
    message.write_text("Say it\n")
    assert run("--message", str(message), cwd=tmp_path).returncode == 1
    assert run(cwd=tmp_path).returncode == 2
