"""A tier that is slower than coding gets compressed records, and gives equal tokens back."""

import logging
import time
from pathlib import Path

import pytest

from contracts.kv_store import BlockKey, BlockWorth
from engine.engine import Engine
from kv_transfer.tiers.remote_store import RemoteStoreTier, open_remote_store
from tests.worker.core.tier_rig import PROMPTS, cached_tokens, host, join, settled, small_engine
from worker.core.kv_tiers import KVTiers

pytestmark = pytest.mark.slow

WHOLE = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
"""The tokens of each prompt in blocks of which some tier has the KV."""


def slow_store(url: str, monkeypatch: pytest.MonkeyPatch) -> RemoteStoreTier:
    """Return the tier of a store that takes 50 ms for a record of some kilobytes."""
    tier = open_remote_store(url)
    store = tier.store

    def slowly(key: BlockKey, record: memoryview, worth: BlockWorth) -> bool:
        time.sleep(0.05)
        return store(key, record, worth)

    monkeypatch.setattr(tier, "store", slowly)
    return tier


def turn(engine: Engine, tiers: KVTiers, name: str, loss: str = "") -> list[tuple[int, list[int]]]:
    """Return of each prompt how much was not computed, and the answer."""
    found = []
    for index, prompt in enumerate(PROMPTS):
        found.append(cached_tokens(engine, prompt, f"{name} {index}", loss))
        settled(tiers)
    return found


def test_a_slow_store_has_records_without_loss_and_equal_tokens(
    folder: Path, tmp_path: Path, expected: list, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = small_engine(folder)
    tiers = join(engine, slow_store(f"file://{tmp_path}", monkeypatch), levels=["lossless"])
    first, again = turn(engine, tiers, "first"), turn(engine, tiers, "again")
    assert [tokens for _, tokens in first] == [tokens for _, tokens in again] == expected
    assert [cached for cached, _ in again] == WHOLE
    counts = tiers.counters()
    assert counts["kv_store_compressed_blocks"] > 0
    assert counts["kv_store_compressed_bytes"] < counts["kv_store_compressed_raw_bytes"]
    assert counts["kv_store_refused_blocks"] == 0
    assert sum("is compressed, level lossless" in line for line in caplog.messages) == 1
    tiers.close()


def test_records_that_lost_something_are_found_only_by_who_names_their_level(
    folder: Path, tmp_path: Path, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    lossy, exact = ["lossless", "4bit"], ["lossless"]
    engine = small_engine(folder)
    tiers = join(engine, slow_store(f"file://{tmp_path}", monkeypatch), levels=lossy)
    turn(engine, tiers, "lossy", "4bit")
    kept = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert tiers.counters()["kv_store_compressed_blocks"] > 0
    tiers.close()

    engine = small_engine(folder)
    tiers = join(engine, open_remote_store(f"file://{tmp_path}"), levels=exact)
    first, again = turn(engine, tiers, "exact"), turn(engine, tiers, "exact again")
    assert [tokens for _, tokens in first] == [tokens for _, tokens in again] == expected
    assert [cached for cached, _ in first] < [cached for cached, _ in again] == WHOLE  # its own records, beside
    assert tiers.counters()["kv_store_refused_blocks"] == 0
    assert all(path.exists() for path in kept)
    tiers.close()


def test_a_prompt_with_loaded_kv_that_lost_something_is_not_found_exactly(
    folder: Path, tmp_path: Path, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(folder)
    tiers = join(engine, slow_store(f"file://{tmp_path}", monkeypatch), levels=["lossless", "4bit"])
    turn(engine, tiers, "first", "4bit")
    tiers.close()

    engine = small_engine(folder)
    tiers = join(engine, open_remote_store(f"file://{tmp_path}"), host(engine), levels=["lossless", "4bit"])
    assert [cached for cached, _ in turn(engine, tiers, "loaded", "4bit")] == WHOLE
    first = turn(engine, tiers, "exact")
    assert [tokens for _, tokens in first] == expected
    assert [cached for cached, _ in first] < WHOLE
    assert [cached for cached, _ in turn(engine, tiers, "both", "4bit")] == WHOLE
    tiers.close()


def test_a_record_of_another_release_that_lost_something_under_an_exact_key_is_forgotten(
    folder: Path, tmp_path: Path, expected: list, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = small_engine(folder)
    with monkeypatch.context() as release:
        release.setattr("worker.core.tier_writer.loss_of", lambda level: "")
        tiers = join(engine, slow_store(f"file://{tmp_path}", release), levels=["lossless", "4bit"])
        turn(engine, tiers, "old", "4bit")
        tiers.close()
    engine = small_engine(folder)
    tiers = join(engine, open_remote_store(f"file://{tmp_path}"), levels=["lossless", "4bit"])
    assert [tokens for _, tokens in turn(engine, tiers, "new")] == expected
    assert tiers.counters()["kv_store_refused_blocks"] > 0
    assert sum("forgotten: level is '4bit', which loses, under the key" in line for line in caplog.messages) == 1
    tiers.close()
