"""The part of a page that a command writes, between two comments of the page."""

from pathlib import Path

END = "<!-- end of what is made -->"


def start(module: str) -> str:
    """Return the comment that the part begins with."""
    return f"<!-- made by: python -m {module} -->"


def read_block(page: Path, module: str) -> str:
    """Return the part of the page; raise ValueError if the comments are missing."""
    return _split(page.read_text(encoding="utf-8"), module)[1].strip("\n")


def write_block(page: Path, module: str, block: str) -> None:
    """Replace the part of the page by `block`."""
    before, _, after = _split(page.read_text(encoding="utf-8"), module)
    page.write_text(f"{before}{start(module)}\n\n{block}\n\n{END}{after}", encoding="utf-8")


def _split(text: str, module: str) -> tuple[str, str, str]:
    before, opened, rest = text.partition(start(module))
    block, closed, after = rest.partition(END)
    if not opened or not closed:
        raise ValueError(f"the page has no {start(module)} with {END} after it")
    return before, block, after
