"""The console in a real browser, against the real system."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import aiohttp
import pytest
from fastapi import FastAPI, Response
from msgspec import to_builtins

from bench.system.local_system import System, running
from checkpoint import open_checkpoint
from contracts.node import NodeLoad
from gateway.console.routes import add_console
from gateway.http.api_keys import ApiKeyMiddleware
from gateway.tenants.tenant_accounts import TenantAccounts
from service.server import serving
from testing.memory_store import MemoryStore
from tests.console.browser import Page, find_chromium
from tests.console.handoffs import two_handoffs
from tests.console.looks import IN_FLIGHT, PARIS, TWO_IN_FLIGHT, ask, look_at
from tests.gateway.gateway_rig import Rig, gateway, pair
from tests.nodes import node_info

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.timeout(300),  # the system of the first test starts within it, on two cores
]

KEY = "console-test-key"
STAGES = "[...document.querySelectorAll('#stages tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
NEAR_MS = 1.0  # each figure is shown rounded
CONTRASTS = """
[...document.querySelectorAll('h1,h2,h3,h4,p,small,dt,dd,th,td,b,label,summary,button')]
  .filter(e => e.checkVisibility() && e.innerText.trim() && !e.matches(':disabled, .unseen, .skip')).map(e => {
    const rgb = color => {
      const dot = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
      dot.fillStyle = color;
      dot.fillRect(0, 0, 1, 1);
      return [...dot.getImageData(0, 0, 1, 1).data];
    };
    const light = color => rgb(color).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
      .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    let under = e;
    while (rgb(getComputedStyle(under).backgroundColor)[3] === 0) under = under.parentElement;
    const [a, b] = [getComputedStyle(e).color, getComputedStyle(under).backgroundColor].map(light)
      .sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.innerText];
  }).sort((x, y) => x[0] - y[0])[0]
"""


async def test_an_answer_is_streamed_with_its_timings(console: Page):
    await console.js(
        "window.lengths = new Set();"
        "new MutationObserver(() => lengths.add(document.querySelector('.model .words')?.innerText.length ?? 0))"
        ".observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true})"
    )
    await ask(console)
    assert "Paris" in await console.text(".model .words")
    assert await console.js("lengths.size") > 3  # it grew
    words = await console.js("[...document.querySelectorAll('.timing dt, .timing dd')].map(e => e.innerText)")
    timing = dict(zip(words[::2], words[1::2], strict=True))
    assert set(timing) == {"TTFT", "tok/s", "gap p50", "gap max", "tokens"} and "…" not in timing.values()
    bars = await console.js("document.querySelector('.gaps path').getAttribute('d').split('M').length - 1")
    assert bars == int(timing["tokens"]) - 1
    assert console.complaints == []


async def test_the_account_is_what_the_services_measured(console: Page, system: System):
    await ask(console)
    rows = await console.js(STAGES)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{system.url}/console/state") as response,
    ):
        facts = (await response.json())["accounts"][0]
    shown = {(where, what.split()[0]): float(ms.replace("\u202f", "")) for where, what, ms in rows}
    stages, prefill = facts["stages_s"], facts["prefill"]
    assert shown[prefill, "compute"] == pytest.approx(1000 * stages["prefill_prefill"], abs=NEAR_MS)
    assert shown["decode-0", "land"] == pytest.approx(1000 * stages["land"], abs=NEAR_MS)
    assert shown["decode-0", "join"] == pytest.approx(1000 * stages["queue"], abs=NEAR_MS)
    assert shown["decode-0", "decode"] == pytest.approx(1000 * stages["decode"], abs=NEAR_MS)
    for stage in ("prepare", "place"):
        assert shown["gateway", stage] == pytest.approx(1000 * stages[stage], abs=NEAR_MS)
    own = [shown["gateway", name] for name in ("prepare", "place", "send")]
    first = sum(own) + shown[prefill, "queue"] + shown[prefill, "compute"]
    assert first == pytest.approx(1000 * facts["ttft_s"], abs=2 * NEAR_MS)  # a sum of five
    assert first + shown["gateway", "stream"] == pytest.approx(1000 * facts["total_s"], abs=2 * NEAR_MS)


async def test_two_handoffs_in_flight_are_seen_and_nothing_moves_for_who_wants_no_motion(page: Page):
    with running(
        "--prefill", "2", TANDEM_NUM_THREADS="1", TANDEM_KV_CACHE_MIB="512", TANDEM_MAX_BATCHED_TOKENS="64"
    ) as system:
        await look_at(page, system, num_workers=3)
        await ask(page, max_tokens=4)  # which makes neither worker count as the slower one
        async with two_handoffs(system.url, "Rome"):
            seen = await page.until(TWO_IN_FLIGHT)
            assert seen["pips"] == 2 and seen["animations"] >= 2
            await page.emulate(1360, 900, prefers_reduced_motion="reduce")
            assert await page.js("document.getAnimations().length") == 0
        await page.until(f"{IN_FLIGHT} === 0 && document.querySelectorAll('#links li').length >= 2")
        assert "chunks sent" in await page.text("#links")


async def test_the_keyboard_is_enough(console: Page):
    await console.js("document.activeElement.blur(); document.getElementById('options').open = false")
    await console.press("Tab")
    assert await console.js("document.activeElement.className") == "skip"
    await console.press("Enter")
    await console.until("document.activeElement.id === 'prompt'")
    await console.js("document.getElementById('max-tokens').value = 2000")
    await console.type("Tell a very long story.")
    await console.press("Enter")
    await console.until("document.querySelector('.model .words')?.innerText.length > 20")
    await console.press("Escape")
    await console.until("document.querySelector('.failed')?.innerText === 'Stopped.'")
    assert await _stops(console) >= {"theme", "log", "SUMMARY", "prompt", "send", "forget"}


async def _stops(page: Page) -> set[str]:
    """Return the stops of the Tab key: ids, names of radio buttons, or tags."""
    stops = set()
    await page.js("document.activeElement.blur(); scrollTo(0, 0)")
    for _ in range(30):
        await page.press("Tab")
        stops.add(await page.js("(e => e.id || e.name || e.tagName)(document.activeElement)"))
    return stops


async def test_colours_follow_the_system_and_the_switch_and_can_be_read(console: Page):
    await ask(console)
    grounds = {}
    for scheme in ("light", "dark"):
        await console.emulate(1360, 900, prefers_color_scheme=scheme)
        grounds[scheme] = await console.js("getComputedStyle(document.body).backgroundColor")
        contrast, words = await console.js(CONTRASTS)
        assert contrast >= 4.5, f"{scheme}: {words!r}"
    assert grounds["light"] != grounds["dark"]
    await console.js("document.querySelector('[name=theme]:checked').focus()")
    await console.press("ArrowRight")  # from auto to light, while the system is dark
    assert await console.js("getComputedStyle(document.body).backgroundColor") == grounds["light"]


async def test_an_answer_that_was_cut_off_says_so(console: Page):
    await ask(console, "Tell a long story.", max_tokens=5)
    await console.until("document.querySelector('.model .hint')?.innerText.startsWith('Cut off here')")
    await ask(console, "Tell another one.", max_tokens=5)
    assert await console.js("document.querySelectorAll('.model .hint').length") == 2


@pytest.mark.parametrize(
    ("temperature", "max_tokens", "words"), [("0.25", 3, ""), ("5", 3, "temperature"), ("", 0, "1")]
)
async def test_options_out_of_sight_are_refused_by_the_server_or_not_at_all(
    console: Page, temperature: str, max_tokens: int, words: str
):
    await console.js(f"document.getElementById('temperature').value = '{temperature}'")
    await console.js(f"document.getElementById('max-tokens').value = {max_tokens}")
    await console.js("document.getElementById('options').open = false; document.getElementById('prompt').focus()")
    await console.type(PARIS)
    await console.press("Enter")
    await console.until("document.querySelector('.model') && !document.getElementById('send').disabled")
    failed = await console.js("document.querySelector('.failed')?.innerText ?? ''")
    assert bool(failed) == bool(words) and words in failed


@pytest.mark.parametrize("width", [375, 768])
async def test_nothing_runs_over_the_edge(console: Page, width: int):
    await ask(console, "x" * 300)
    await console.emulate(width, 812)
    assert await console.js("document.documentElement.scrollWidth") <= width
    assert await console.js("document.getElementById('prompt').checkVisibility()")


async def test_words_stay_words_and_nothing_else_is_asked_of_anyone(console: Page, system: System):
    await ask(console, "<img src=https://example.org/x onerror=alert(1)><b>bold</b>")
    assert await console.js("document.querySelectorAll('#log img, #log b').length") == 0
    assert "<b>bold</b>" in await console.text(".user .words")
    assert {url for url in console.requests if not url.startswith(f"{system.url}/")} == set()
    assert console.complaints == []


async def test_a_key_is_asked_for_and_kept_in_the_page_only(page: Page):
    async with _guarded() as url:
        await page.open(f"{url}/")
        await page.until("document.getElementById('condition').textContent.includes('API key')")
        await page.js("document.getElementById('options').open = true; document.getElementById('key').focus()")
        await page.type(KEY)
        await page.press("Tab")
        await page.until("document.getElementById('model').textContent.startsWith('guarded')")
        kept = await page.js("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
        assert KEY not in kept
        await page.open(f"{url}/")
        await page.until("document.getElementById('condition').textContent.includes('API key')")


@asynccontextmanager
async def _guarded() -> AsyncIterator[str]:
    """The console behind the gateway's keys, with nothing else behind it."""
    app = FastAPI()
    nobody = TenantAccounts()
    app.add_middleware(ApiKeyMiddleware, keys=KEY, refuse=lambda _, why: Response(why, 401), tenants=nobody)
    add_console(app, SimpleNamespace(num_inflight=0, workers=SimpleNamespace(nodes=[])), MemoryStore())  # type: ignore
    app.get("/v1/models")(lambda: {"data": [{"id": "guarded", "max_model_len": 1}]})
    listener = socket.create_server(("127.0.0.1", 0))
    async with serving(app, listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_worker_has_a_cell_for_each_of_its_tiers(page: Page):
    """Hits by tier and what it holds; a store knows no size, one that is off says so, and no pull is no cell."""
    counters = {"kv_host_loaded_blocks": 12, "kv_disk_loaded_blocks": 1, "kv_store_loaded_blocks": 0}
    counters["kv_peer_hit_blocks"] = 7
    gauges = {"reserved": 0, "held": 0, "kv_host_bytes": 34_000_000, "kv_disk_bytes": 5, "kv_store_on": 0}
    async with _alone(counters, gauges) as url:
        await page.open(f"{url}/")
        await page.until("document.querySelectorAll('.worker').length === 1")
        parts = "[...document.querySelectorAll('.worker dl div')].map(e => [...e.children].map(c => c.textContent))"
        cells = f"Object.fromEntries({parts})"
        shown = await page.js(cells)
        assert shown["memory tier"] == "12 hits · 34.0 MB kept" and shown["disk tier"] == "1 hit · 5 B kept"
        assert shown["store tier"] == "0 hits · off" and shown["other workers"] == "7 hits"
        assert page.complaints == []
    async with _alone({"kv_peer_hit_blocks": 0}, gauges) as url:
        await page.open(f"{url}/")
        await page.until("document.querySelectorAll('.worker').length === 1")
        assert not {"memory tier", "other workers"} & {*(await page.js(cells))}


@asynccontextmanager
async def _alone(counters: dict[str, int], gauges: dict[str, int]) -> AsyncIterator[str]:
    """The console, and a worker that says no more than this of itself."""
    app, store, listener = FastAPI(), MemoryStore(), socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await store.join(node_info(url=url))
    core = {"load": to_builtins(NodeLoad()), "counters": counters, "gauges": gauges, "links": []}
    app.get("/health")(lambda: {"status": "ok", "incarnation": "1", "core": core})
    app.get("/v1/models")(lambda: {"data": [{"id": "alone", "max_model_len": 1}]})
    add_console(app, SimpleNamespace(num_inflight=0, workers=SimpleNamespace(nodes=[])), store)  # type: ignore
    async with serving(app, listener):
        yield url


async def test_reasoning_is_apart_from_the_answer_and_folds_when_that_comes(page: Page):
    async with _thinking("<b>We</b> need the capital of France.</think>Paris.") as rig:
        await page.open(f"{rig.url}/")
        await page.js(
            "window.lengths = new Set(); const log = document.getElementById('log');"
            "new MutationObserver(() => log.querySelector('.thought')?.open"
            " && lengths.add(log.querySelector('.thoughts').innerText.length)).observe(log,"
            " {childList: true, subtree: true, characterData: true}); document.getElementById('prompt').focus()"
        )
        await page.type(PARIS)
        await page.press("Enter")
        await page.until("document.querySelector('.model') && !document.getElementById('send').disabled")
        assert await page.text(".model .words") == "Paris."
        assert not await page.js("document.querySelector('.thought').open")
        assert await page.js("lengths.size") > 3  # it was seen to grow
        await page.js("document.querySelector('.thought').open = true")
        assert await page.text(".thoughts") == "<b>We</b> need the capital of France."
        assert page.complaints == []


async def test_a_question_that_was_only_thought_about_is_not_part_of_the_next_prompt(page: Page):
    """The same holds if nothing was answered at all; some chat templates refuse an empty answer."""
    async with _thinking("We need the capital of France.") as rig:
        await page.open(f"{rig.url}/")
        await page.js("document.getElementById('prompt').focus()")
        for number in (1, 2):
            await page.type(PARIS)
            await page.press("Enter")
            ended = f"document.querySelectorAll('.model .thoughts').length === {number}"
            await page.until(f"{ended} && !document.getElementById('send').disabled")
        first, second = rig.workers[0].jobs
        assert first.token_ids == second.token_ids


@asynccontextmanager
async def _thinking(answer: str) -> AsyncIterator[Rig]:
    """A gateway with a console, whose model thinks before it answers."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}<think>"
    checkpoint = replace(open_checkpoint(""), chat_template=template)
    async with gateway(checkpoint, pair(period_s=0.02)) as rig:
        for worker in rig.workers:
            worker.script = rig.front.prompting.tokenizer.encode(answer).ids
        add_console(rig.server.config.app, rig.front.dispatch, MemoryStore())  # type: ignore[arg-type]
        yield rig


async def test_a_refusal_is_shown_in_the_servers_words(console: Page):
    await console.js("document.getElementById('max-tokens').value = 1000000; document.getElementById('prompt').focus()")
    await console.type(PARIS)
    await console.press("Enter")
    await console.until("document.querySelector('.failed')?.innerText.includes('1000000')")
