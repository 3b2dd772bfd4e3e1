"""The Lua scripts: each is the state table, the placement's constants, common.lua and its own file, in that order."""

from pathlib import Path

from coordinator import request_states as states
from coordinator.placement import policy as placement
from coordinator.store.store import ENDED_KEPT_S

FOLDER = Path(__file__).with_name("lua")
NAMES = (
    "join",
    "heartbeat",
    "leave",
    "workers",
    "counts",
    "place",
    "advance",
    "finish",
    "renew",
    "reap",
    "lead",
    "resign",
)


def load_scripts() -> dict[str, str]:
    """Name -> source."""
    head = "\n".join([
        states.to_lua(),
        placement.to_lua(),
        f"local ENDED_KEPT_MS = {int(ENDED_KEPT_S * 1000)}",
        (FOLDER / "common.lua").read_text(),
    ])  # fmt: skip
    return {name: f"{head}\n{(FOLDER / f'{name}.lua').read_text()}" for name in NAMES}
