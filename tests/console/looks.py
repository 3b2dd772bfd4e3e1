"""The console as who uses it meets it: opened, asked, and looked at. Not a test."""

from bench.system.local_system import System
from tests.console.browser import Page

PARIS = "What is the capital of France?"
IN_FLIGHT = "Number(document.querySelector('[data-state=TRANSFERRING] b').innerText)"
TWO_IN_FLIGHT = f"""
{IN_FLIGHT} === 2 && {{
  pips: document.querySelectorAll('[data-state=TRANSFERRING] .pips i').length,
  animations: document.getAnimations().length
}}
"""  # one look: the next one may be too late


async def look_at(page: Page, system: System, num_workers: int) -> Page:
    """The page, when it shows so many workers."""
    await page.emulate(1360, 900, prefers_color_scheme="light")
    await page.open(f"{system.url}/")
    await page.until(f"document.querySelectorAll('.state.ready').length === {num_workers}")
    return page


async def ask(page: Page, text: str = PARIS, max_tokens: int = 24) -> None:
    """From the keyboard, until the answer is complete and its time accounted for."""
    await page.js(f"document.getElementById('max-tokens').value = {max_tokens}")
    await page.js("document.getElementById('temperature').value = 0; document.getElementById('prompt').focus()")
    await page.type(text)
    await page.press("Enter")
    await page.until("document.querySelector('.model') && !document.getElementById('send').disabled")
    await page.until("[...document.querySelectorAll('#stages td')].some(cell => cell.innerText === 'this page')")
