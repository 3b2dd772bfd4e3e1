"""The Lua scripts: each is the sets of states, common.lua and its own file, in that order."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from coordinator import request_states as states
from coordinator.store.store import ENDED_KEPT_S, MAX_HELD_BY

FOLDER = Path(__file__).with_name("lua")
NAMES = (
    "join",
    "heartbeat",
    "restate",
    "leave",
    "workers",
    "counts",
    "pool",
    "prefixes",
    "held",
    "claim",
    "migrate",
    "migrated",
    "advance",
    "finish",
    "renew",
    "reap",
    "check",
    "adopt",
    "recount",
    "lead",
    "resign",
)


ALONE = ("prefixes",)
"""They take nothing of common.lua, which costs each call some microseconds."""


@dataclass(frozen=True)
class Script:
    """A script and its name in Redis.

    `sha`: SHA-1 of the source in hexadecimal, by which Redis knows what it has run once.
    """

    source: str
    sha: str


def load_scripts() -> dict[str, Script]:
    """Return each script by its name."""
    ended_kept = f"local ENDED_KEPT_MS = {int(ENDED_KEPT_S * 1000)}"
    held_by = f"local MAX_HELD_BY = {MAX_HELD_BY}"
    head = "\n".join([states.sets_to_lua(), ended_kept, held_by, (FOLDER / "common.lua").read_text()])
    heads = dict.fromkeys(NAMES, head) | dict.fromkeys(ALONE, "")
    heads["advance"] = f"{states.moves_to_lua()}\n{head}"
    return {name: _script(f"{heads[name]}\n{(FOLDER / f'{name}.lua').read_text()}") for name in NAMES}


def _script(source: str) -> Script:
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
