"""The code blocks of the documentation. Not a test."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HISTORY = DOCS / "history"
"""Notebooks: outside the site, and kept as they were written."""
SITE = sorted(page for page in DOCS.rglob("*.md") if not page.is_relative_to(HISTORY))
PAGES = [ROOT / "README.md", *SITE]
GATEWAY = "localhost:8000"
_FENCE = re.compile(r"^```(\w+)(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


@dataclass(frozen=True)
class Fence:
    """`where`: page and line. `checked`: not to be run, only looked at."""

    where: str
    language: str
    checked: bool
    text: str


def all_fences() -> list[Fence]:
    return [fence for page in PAGES for fence in fences(page)]


def fences(page: Path) -> list[Fence]:
    text, name = page.read_text(), page_name(page)
    return [
        Fence(f"{name}:{text.count(chr(10), 0, found.start()) + 1}", found[1], "checked" in found[2], found[3])
        for found in _FENCE.finditer(text)
    ]


def page_name(page: Path) -> str:
    """Return the path in docs/, or README.md."""
    return str(page.relative_to(DOCS)) if page.is_relative_to(DOCS) else page.name


def shell(checked: bool) -> list[Fence]:
    """What is to be run, each once; or what is only to be looked at."""
    found = [fence for fence in all_fences() if fence.language in ("sh", "bash") and fence.checked == checked]
    return list({fence.text: fence for fence in found}.values())


def programs() -> list[Fence]:
    """Python that asks a gateway."""
    return [fence for fence in all_fences() if fence.language == "python" and GATEWAY in fence.text]
