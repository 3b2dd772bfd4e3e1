"""A system whose answers move, and halt on their way, when a benchmark says so."""

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.serving.migration import halting_core
from bench.serving.migration.moving_gateway import MOVED_FILE, MOVES_FILE
from bench.system.local_system import get_json
from bench.system.services import Services

HALT_POLL_S = 0.005


class MovingServices(Services):
    """Services with a moving gateway and halting workers; see these modules for the files in `folder`."""

    def __init__(self, folder: Path, workers: Mapping[str, tuple[str, ...]], **settings: str) -> None:
        self._moves_file, self._moved_file, self._halts = folder / "moves", folder / "moved", folder
        files = {MOVES_FILE: self._moves_file, MOVED_FILE: self._moved_file, halting_core.FOLDER: folder}
        super().__init__(folder, workers, **settings, **{name: str(path) for name, path in files.items()})

    def order(self, share: float) -> None:
        """Let each worker give away this share of its answers at each of ten looks a second; 0: none."""
        self._moves_file.write_text(str(share), "utf-8")

    def moved(self) -> list[dict[str, Any]]:
        """Return what the gateway has written of each answer that moved."""
        if not self._moved_file.exists():
            return []
        return [json.loads(line) for line in self._moved_file.read_text("utf-8").splitlines()]

    def arm(self, point: str) -> None:
        """Let the next core that reaches this point of a migration halt there."""
        for name in (halting_core.REACHED, halting_core.GO, "taken"):
            (self._halts / name).unlink(missing_ok=True)
        (self._halts / "arming").write_text(point, "utf-8")
        (self._halts / "arming").rename(self._halts / halting_core.ARM)

    async def reached(self, timeout_s: float) -> str:
        """Wait until a core halts, and return the id of its worker. Raises TimeoutError."""
        until, file = time.monotonic() + timeout_s, self._halts / halting_core.REACHED
        while not file.exists():
            if time.monotonic() > until:
                (self._halts / halting_core.ARM).unlink(missing_ok=True)
                raise TimeoutError("no migration came to the point")
            await asyncio.sleep(HALT_POLL_S)
        return file.read_text("utf-8")

    def go_on(self) -> None:
        """Let the core that halts go on."""
        (self._halts / halting_core.GO).touch()

    def counter(self, name: str) -> float:
        """Return the sum of a counter of the workers' cores; those of cores that have ended are gone."""
        cores = [get_json(f"{self.facts(worker)['url']}/health")["core"] for worker in self.workers]
        return sum(core["counters"].get(name, 0.0) for core in cores)

    def _command(self, name: str) -> list[str]:
        command = super()._command(name)
        if name == "gateway":
            return ["bench.serving.migration.moving_gateway", *command[1:]]
        return ["bench.serving.migration.halting_worker", *command[2:]] if name in self.workers else command
