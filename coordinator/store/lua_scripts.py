"""The Lua scripts: each is the sets of states, common.lua and its own file, in that order."""

from pathlib import Path

from coordinator import request_states as states
from coordinator.store.store import ENDED_KEPT_S

FOLDER = Path(__file__).with_name("lua")
NAMES = (
    "join",
    "heartbeat",
    "role",
    "leave",
    "workers",
    "counts",
    "pool",
    "prefixes",
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


def load_scripts() -> dict[str, str]:
    """Return the source of each script by its name."""
    ended_kept = f"local ENDED_KEPT_MS = {int(ENDED_KEPT_S * 1000)}"
    head = "\n".join([states.sets_to_lua(), ended_kept, (FOLDER / "common.lua").read_text()])
    heads = dict.fromkeys(NAMES, head) | dict.fromkeys(ALONE, "")
    heads["advance"] = f"{states.moves_to_lua()}\n{head}"
    return {name: f"{heads[name]}\n{(FOLDER / f'{name}.lua').read_text()}" for name in NAMES}
