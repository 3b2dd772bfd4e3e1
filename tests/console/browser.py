"""Chromium without a window, driven over the DevTools protocol."""

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 60.0
UNTIL_TIMEOUT_S = 90.0


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One tab. `requests`: every URL asked for; `complaints`: errors and warnings of its console."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._replies: dict[int, asyncio.Future[dict]] = {}
        self._reading = asyncio.create_task(self._read())
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict:
        """Raises RuntimeError with the browser's words if it refuses."""
        number = len(self._replies)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await reply

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def js(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']['exception'].get('description')}")
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Waits until it is true. Raises AssertionError with what the page says instead."""
        deadline = asyncio.get_running_loop().time() + UNTIL_TIMEOUT_S
        while not (value := await self.js(expression)):
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"never true: {expression}; the page:\n{await self.js('document.body.innerText')}")
            await asyncio.sleep(0.05)
        return value

    async def text(self, selector: str) -> str:
        return await self.js(f"document.querySelector({selector!r}).innerText")

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """A key as `KeyboardEvent.key` names it."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, " ": 32}
        key_event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"Enter": {"text": "\r"}, " ": {"text": " "}}.get(key, {})
        await self.call("Input.dispatchKeyEvent", type="keyDown", **key_event, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **key_event)

    async def emulate(self, width: int, height: int, **media: str) -> None:
        """Size in CSS pixels, and media features such as `prefers-color-scheme` (with _ for -)."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._settle(self._replies[said["id"]], said)
            else:
                self._note(said["method"], said["params"])

    def _settle(self, reply: asyncio.Future[dict], said: dict) -> None:
        if "error" in said:
            reply.set_exception(RuntimeError(said["error"]["message"]))
        else:
            reply.set_result(said["result"])

    def _note(self, method: str, params: dict) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextmanager
def launched(program: str) -> Iterator[str]:
    """A browser with a fresh profile; yields where it listens, as ws://HOST:PORT/PATH."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        flags += ("--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={profile}")
        quiet = subprocess.DEVNULL
        process = subprocess.Popen([program, *flags, "about:blank"], stdout=quiet, stderr=quiet)
        try:
            port, path = _wait_port(process, Path(profile) / "DevToolsActivePort")
            yield f"ws://127.0.0.1:{port}{path}"
        finally:
            process.terminate()
            process.wait()


@asynccontextmanager
async def opened_page(browser: str) -> AsyncIterator[Page]:
    """An empty tab that shares nothing, no storage either, with any other."""
    async with aiohttp.ClientSession() as session:
        root = Page(await session.ws_connect(browser, max_msg_size=0))
        context = (await root.call("Target.createBrowserContext"))["browserContextId"]
        tab = await root.call("Target.createTarget", url="about:blank", browserContextId=context)
        address = f"{browser.partition('/devtools')[0]}/devtools/page/{tab['targetId']}"
        page = Page(await session.ws_connect(address, max_msg_size=0))
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.call(f"{domain}.enable")
        try:
            yield page
        finally:
            await page.close()
            await root.call("Target.disposeBrowserContext", browserContextId=context)
            await root.close()


def _wait_port(process: subprocess.Popen, file: Path) -> list[str]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while len(words := file.read_text().split() if file.exists() else []) < 2:
        assert process.poll() is None, f"the browser ended with code {process.returncode}"
        assert time.monotonic() < deadline, "the browser does not listen"
        time.sleep(0.05)
    return words
