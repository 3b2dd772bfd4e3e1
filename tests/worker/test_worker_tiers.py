"""A real worker with tiers below its KV cache: they outlive it, and settings that can't be are named."""

from pathlib import Path
from typing import get_args

import pytest

from contracts.events import Prefilled, Tokens
from kv_transfer.codecs.level import LEVELS, SETTINGS
from tests.e2e.tiny import save_tiny
from tests.waiting import until
from tests.worker.test_worker_process import refused
from tests.worker.worker_rig import Gateway, connected, running_worker
from worker.settings import KVCodec

pytestmark = pytest.mark.slow

NUM_BLOCKS = 12
"""The full blocks of the 200 tokens of a prompt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


async def serve_one(folder: Path, model: str, *flags: str) -> tuple[list[int], Prefilled, dict[str, float]]:
    """Return the tokens of a job at a new worker, what it said of the prompt, and its metrics."""
    events = []

    async def body(gateway: Gateway) -> None:
        await gateway.post(gateway.job("a", num_tokens=200))
        await gateway.until(lambda: gateway.ends("a"))
        events.extend(gateway.events)

    folder.mkdir()
    with running_worker(folder, model, *flags) as worker:
        await connected(worker, body)
        worker.wait_clean()
        if "--kv-disk" in flags:
            until(lambda: worker.metrics()["tandem_worker_kv_tier_blocks"] >= 2 * NUM_BLOCKS)  # in both tiers
        metrics = worker.metrics()
    tokens = [token.token_id for event in events if isinstance(event, Tokens) for token in event.tokens]
    (prefilled,) = [event for event in events if isinstance(event, Prefilled)]
    return tokens, prefilled, metrics


async def test_a_prompt_is_on_disk_when_its_worker_was_killed(tmp_path: Path) -> None:
    """With the default model: a tiny one computes a prompt sooner than a disk gives it, as it measures at its start."""
    model = ""
    plain, alone, _ = await serve_one(tmp_path / "plain", model)
    flags = "--kv-disk", str(tmp_path / "kv"), "--kv-host-gib", "0.1"
    first, prefilled, _ = await serve_one(tmp_path / "one", model, *flags)
    assert (first, prefilled.cached_tokens) == (plain, 0)
    again, loaded, metrics = await serve_one(tmp_path / "again", model, *flags)
    # On a busy machine the load may be given up, with what has come by then.
    num_loaded, num_missed = (metrics[f"tandem_worker_kv_{what}_blocks_total"] for what in ("loaded", "missed"))
    assert (again, loaded.cached_tokens, num_loaded + num_missed) == (plain, num_loaded * 16, NUM_BLOCKS)
    assert f"KV on disk: {NUM_BLOCKS} blocks" in (tmp_path / "again/log").read_text()
    assert loaded.stages_s["load"] > 0 and metrics["tandem_worker_kv_load_seconds_total"] > 0
    assert "load" not in alone.stages_s
    measured = "tokens/s, as measured at the start"
    assert measured in (tmp_path / "again/log").read_text() and measured not in (tmp_path / "plain/log").read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-store", "s4://bucket"), "kv_store is 's4://bucket': it must begin with redis://"),
        (("--kv-disk", "kv"), "kv_disk is 'kv': it must be an absolute path"),
        (("--kv-host-gib", "1e-9"), "kv_host_gib is 1e-09; one block takes"),
        (("--kv-disk", "/kv", "--kv-disk-gib", "1e-9"), "kv_disk_gib is 1e-09; one block takes"),
        (("--kv-store", "redis://host/abc"), "the number of a database stands behind the host"),
        (("--kv-host-gib", "1e6"), "kv_host_gib is 1000000.0;"),
    ],
)
def test_names_a_setting_that_can_not_be(model: str, flags: tuple[str, ...], words: str) -> None:
    assert words in refused("--model", model, "--dtype", "float32", *flags)


def test_the_levels_of_the_setting_are_those_of_the_codec() -> None:
    assert get_args(KVCodec) == (*SETTINGS, *LEVELS)
