"""What is not imported before the first process is started: each of these takes tenths of a second."""

import subprocess
import sys
from pathlib import Path

from tests.e2e.tiny import save_tiny

ROOT = Path(__file__).parents[2]
SLOW = ("torch", "numpy", "gguf", "redis", "fastapi", "uvicorn", "aiohttp", "prometheus_client", "huggingface_hub")


def imported(code: str) -> set[str]:
    """Which of them the code imports, in a process of its own."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*(name for name in {SLOW} if name in sys.modules))"]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def test_up_imports_nothing_slow() -> None:
    assert imported("import tandem.commands.up") == set()


def test_a_worker_starts_its_core_before_it_imports_what_is_slow() -> None:
    code = """
import worker.main
from contracts.errors import ConfigError

class Core(worker.main.CoreProcess):
    async def start(self):
        raise ConfigError("seen")

worker.main.CoreProcess = Core
assert worker.main.main(["--secret", "s", "--redis-url", "redis://127.0.0.1:1/0"]) == 1
"""
    assert imported(code) == set()


def test_a_core_imports_no_redis_unless_it_has_a_store_there() -> None:
    assert "redis" not in imported("import worker.core.main")


def test_looking_at_a_model_folder_imports_nothing_slow(tmp_path: Path) -> None:
    assert imported(f"from checkpoint import open_checkpoint; open_checkpoint({str(save_tiny(tmp_path))!r})") == set()
