"""What the pages say was measured is in a result file, and a result file is there because something names it."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from bench.report import eagle3_table, kv_codec_table, readme_table, slow_network_table, vllm_comparison
from bench.report.marked_block import read_block
from bench.report.result import RESULTS
from tests.docs.fences import HISTORY, PAGES, ROOT, page_name

RESULT = re.compile(r"\b(?:20\d\d-\d\d-\d\d-[a-z][a-z0-9-]*)")
FILES = sorted((ROOT / RESULTS).iterdir())


def named(text: str) -> set[str]:
    """Return the names of result files in a text, without their endings."""
    return set(RESULT.findall(text))


def test_the_readme_has_the_table_of_the_result_files() -> None:
    """`python -m bench.report.readme_table` writes it anew."""
    assert read_block(readme_table.README, readme_table.MODULE) == readme_table.table()
    assert len(readme_table.LINES) <= 10


def test_the_page_on_vllm_has_the_tables_of_the_result_files() -> None:
    """`python -m bench.report.vllm_comparison` writes them anew."""
    assert read_block(vllm_comparison.PAGE, vllm_comparison.MODULE) == vllm_comparison.tables()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_result_that_a_page_names_is_kept(page: Path) -> None:
    assert named(page.read_text()) <= {file.stem for file in FILES}


def test_a_result_that_is_kept_is_named() -> None:
    """A page, a test or a program names it; the notebooks do not count."""
    listed = subprocess.run(["git", "ls-files", "*.md", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.splitlines() if not name.startswith(f"{RESULTS}/")]
    texts = [path.read_text() for path in paths if path.exists() and not path.is_relative_to(HISTORY)]
    assert sorted({file.stem for file in FILES} - named("\n".join(texts))) == []


@pytest.mark.parametrize("file", [file for file in FILES if file.suffix == ".json"], ids=lambda file: file.stem)
def test_a_peer_was_measured_in_the_same_run(file: Path) -> None:
    peers = {str(row["peer"]) for row in json.loads(file.read_text())["rows"]}
    assert [peer for peer in peers if re.search(r"quoted|(other|another) run", peer)] == []


def test_the_table_of_codec_levels_is_what_its_result_file_says() -> None:
    """`python -m bench.report.kv_codec_table` writes it anew."""
    assert read_block(kv_codec_table.PAGE, kv_codec_table.MODULE) == kv_codec_table.table()


def test_the_table_of_slow_networks_is_what_its_result_file_says() -> None:
    """`python -m bench.report.slow_network_table` writes it anew."""
    assert read_block(slow_network_table.PAGE, slow_network_table.MODULE) == slow_network_table.table()


def test_the_tables_of_eagle3_heads_are_what_their_result_files_say() -> None:
    """`python -m bench.report.eagle3_table` writes them anew."""
    assert read_block(eagle3_table.PAGE, eagle3_table.MODULE) == eagle3_table.tables()
