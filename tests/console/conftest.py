"""One system with the real model and one browser for all tests of the console; each has a page of its own."""

from collections.abc import AsyncIterator, Iterator

import pytest

from bench.system.local_system import System, running
from tests.console.browser import Page, find_chromium, launched, opened_page
from tests.console.looks import look_at


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running(TANDEM_NUM_THREADS="1", TANDEM_KV_CACHE_MIB="512", TANDEM_MAX_BATCHED_TOKENS="128") as system:
        yield system


@pytest.fixture(scope="module")
def browser() -> Iterator[str]:
    program = find_chromium()
    assert program is not None
    with launched(program) as browser:
        yield browser


@pytest.fixture
async def page(browser: str) -> AsyncIterator[Page]:
    async with opened_page(browser) as page:
        yield page


@pytest.fixture
async def console(page: Page, system: System) -> Page:
    """With the workers shown."""
    return await look_at(page, system, num_workers=2)
