"""Take the pictures in docs/images again: of a real system, with two handoffs in flight.

python -m tests.console.pictures

Needs Chromium and tmux.
"""

import asyncio
import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

from bench.system.local_system import System, running
from tests.console.browser import Page, find_chromium, launched, opened_page
from tests.console.handoffs import two_handoffs
from tests.console.looks import TWO_IN_FLIGHT, ask

FOLDER = Path("docs/images")
WIDTH, HEIGHT = 1360, 1180
PHONE = 390
COLUMNS, LINES = 100, 18
TOP_TIMEOUT_S = 60.0


def main() -> None:
    program = find_chromium()
    if program is None:
        sys.exit("needs Chromium: apt-get install chromium")
    one_thread = {"TANDEM_NUM_THREADS": "1", "TANDEM_MAX_BATCHED_TOKENS": "64"}
    with running("--prefill", "2", **one_thread) as system, launched(program) as browser:
        asyncio.run(take_all(system, browser))


async def take_all(system: System, browser: str) -> None:
    async with opened_page(browser) as page:
        await page.emulate(WIDTH, HEIGHT, prefers_color_scheme="light")
        await page.open(f"{system.url}/")
        await page.until("document.querySelectorAll('.state.ready').length === 3")
        await ask(page, "What is the capital of France?")
        await ask(page, "Name one river there.")
        await page.js("document.activeElement.blur()")
        for scheme in ("light", "dark"):
            await page.emulate(WIDTH, HEIGHT, prefers_color_scheme=scheme)
            async with two_handoffs(system.url, scheme, num_riders=4):
                await page.until(TWO_IN_FLIGHT)
                await page.screenshot(FOLDER / f"console-{scheme}.png")
        await page.emulate(PHONE, 1900, prefers_color_scheme="dark")
        async with two_handoffs(system.url, "Oslo", num_riders=4):
            await page.until(TWO_IN_FLIGHT)
            await page.screenshot(FOLDER / "console-phone.png")
        await take_top(system, page)


async def take_top(system: System, page: Page) -> None:
    """What tmux shows of `tandem top`, drawn by the browser."""
    with terminal(system) as screen:
        async with two_handoffs(system.url, "Bern", num_riders=4), asyncio.timeout(TOP_TIMEOUT_S):
            while "2 granted" not in (shown := screen()) or "MB/s" not in shown:
                await asyncio.sleep(0.2)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(shown.rstrip()))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "top.html"
        file.write_text(f"<body style='margin:0'>{console.export_svg(title='tandem top')}")
        await page.open(file.as_uri())
        size = await page.js("(({width, height}) => [width, height])(document.querySelector('svg').viewBox.baseVal)")
        await page.emulate(*map(round, size))
        await page.screenshot(FOLDER / "top.png")


@contextmanager
def terminal(system: System) -> Iterator:
    """`tandem top` in a terminal of its own; yields what reads its screen, colours included."""
    tmux = ["tmux", "-L", f"tandem-{system.port}"]
    top = [sys.executable, "-m", "tandem", "top", "--interval", "1", "--port", str(system.port)]
    subprocess.run([*tmux, "new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), *top], check=True)
    capture = [*tmux, "capture-pane", "-e", "-p"]
    try:
        yield lambda: subprocess.run(capture, check=True, capture_output=True, text=True).stdout
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)


if __name__ == "__main__":
    main()
