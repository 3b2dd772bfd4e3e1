"""The servers that already run and speak OpenAI's API, Tandem or another, under names for the results."""

import argparse
from dataclasses import dataclass

import aiohttp

from bench.load.generator import TargetServer, first_model, version_of
from contracts.errors import Unavailable


@dataclass(frozen=True)
class Named:
    """A server under the name that results use; several `urls` are replicas of one model, used in turn."""

    name: str
    urls: tuple[str, ...]


def named(text: str) -> Named:
    """Parse `NAME=URL` or `NAME=URL,URL`."""
    name, _, urls = text.partition("=")
    found = tuple(url.rstrip("/") for url in urls.split(","))
    if not name or not all(url.startswith(("http://", "https://")) for url in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL or NAME=URL,URL as vllm=http://127.0.0.1:8000 is")
    return Named(name, found)


@dataclass(frozen=True)
class Found:
    """A server and what it says of itself; `version` is empty if it says none."""

    urls: tuple[str, ...]
    model: str
    version: str

    def server(self, vocabulary: int, quiet_s: float) -> TargetServer:
        first, *others = self.urls
        return TargetServer(first, self.model, vocabulary, quiet_s, tuple(others))


async def found_at(http: aiohttp.ClientSession, urls: tuple[str, ...], model: str) -> Found:
    """Return the server at these URLs.

    `model` is what the server calls the model; if it is empty, the first that the server lists. Unavailable is raised
    if it lists none, or if replicas list different ones.
    """
    try:
        listed = {url: model or (await first_model(http, url))["id"] for url in urls}
    except Unavailable as error:
        raise Unavailable(f"{error} (a server that lists no model: --served-name has its name)") from error
    if len(set(listed.values())) > 1:
        raise Unavailable(f"replicas serve one model, and these list {', '.join(map(repr, listed.values()))}")
    return Found(urls, listed[urls[0]], await version_of(http, urls[0]))
