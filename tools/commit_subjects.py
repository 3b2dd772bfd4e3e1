"""The check of the first lines of commit messages.

    usage: python3 tools/commit_subjects.py RANGE            every commit of a range of git, such as origin/main..HEAD
           python3 tools/commit_subjects.py --message FILE   the message in a file, as git hands it to a commit-msg hook

A subject is `area: imperative subject`, at most 72 characters, without a full stop.
"""

import re
import subprocess
import sys
from pathlib import Path

MAX_LENGTH = 72
SUBJECT = re.compile(r"[a-z0-9_.][a-z0-9_./-]*(, [a-z0-9_./-]+)*: \S.*")
MADE_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")


def fault(subject: str) -> str | None:
    """Return what is wrong with a subject, or None."""
    if subject.startswith(MADE_BY_GIT):
        return None
    if len(subject) > MAX_LENGTH:
        return f"has {len(subject)} characters; at most {MAX_LENGTH} are allowed"
    if not SUBJECT.fullmatch(subject):
        return "is not `area: imperative subject`, with a folder in lower case as the area"
    return "ends with a full stop" if subject.endswith(".") else None


def main(arguments: list[str]) -> int:
    """Print what is wrong and return 1, or return 0."""
    match arguments:
        case ["--message", file]:
            subjects = Path(file).read_text(encoding="utf-8").splitlines()[:1] or [""]
        case [commits]:
            command = ["git", "log", "--no-merges", "--format=%s", commits]
            subjects = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    faults = [f"{subject!r} {wrong}" for subject in subjects if (wrong := fault(subject))]
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
