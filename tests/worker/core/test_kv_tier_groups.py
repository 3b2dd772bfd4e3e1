"""Tiers keep and give the pages of every group of layers that a block has, as one record."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from contracts.hashing import chain_hashes
from contracts.kv_store import KVStore
from engine.engine import Engine
from engine.loader import load_engine
from kv_transfer.tiers.remote_store import open_remote_store
from tests.engine.driving import greedy, random_prompts, request, settings
from tests.engine.tiny_models import VOCAB, save_tiny
from tests.path.beside import head_groups, pages_of_prompt, put_beside
from tests.worker.core.tier_rig import PROMPTS, answer, cached_tokens, disk, host, join, settled, small_engine

pytestmark = pytest.mark.slow

HEAD = head_groups("a head")


@pytest.fixture
def engine(folder: Path) -> Engine:
    return engine_with(folder, "a head")


def engine_with(folder: Path, weights: str) -> Engine:
    engine = small_engine(folder)
    put_beside(engine, head_groups(weights), seed=1)
    return engine


def digests_of(prompt: Sequence[int]) -> list[bytes]:
    return chain_hashes(prompt[:-1], 16)


def evict_first(engine: Engine) -> None:
    """Answer other prompts, more than the pool holds."""
    for index in (1, 2):
        answer(engine, PROMPTS[index], f"evicts {index}")
    assert not engine.pool.find_by_digest(digests_of(PROMPTS[0]))


def overwrite(engine: Engine) -> None:
    """Put other bytes into all pages beside the model's."""
    for pool in engine.transfer_pool[1:]:
        pool[:] = ~pool


@pytest.mark.parametrize("kind", ["host", "disk", "store"])
@pytest.mark.parametrize("levels", [(), ("lossless",)], ids=["raw", "lossless"])
def test_what_comes_back_has_the_pages_of_every_group(
    engine: Engine, tmp_path: Path, expected: list, kind: str, levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.tiers.record_codec.choose_level", lambda *_: levels[0] if levels else "")
    monkeypatch.setattr("kv_transfer.tiers.record_codec.WriteRate.nbytes_per_s", 1.0)
    make: dict[str, Callable[[], KVStore]] = {
        "host": lambda: host(engine),
        "disk": lambda: disk(engine, tmp_path / "disk"),
        "store": lambda: open_remote_store(f"file://{tmp_path}"),
    }
    tiers = join(engine, make[kind](), levels=levels)
    try:
        assert answer(engine, PROMPTS[0], "first") == expected[0]
        settled(tiers)
        before = pages_of_prompt(engine, digests_of(PROMPTS[0]))
        evict_first(engine)
        settled(tiers)
        overwrite(engine)
        assert cached_tokens(engine, PROMPTS[0], "again") == (16 * len(digests_of(PROMPTS[0])), expected[0])
        after = pages_of_prompt(engine, digests_of(PROMPTS[0]))
        assert len(before) == 3 and all(map(np.array_equal, before, after))
        num_compressed = tiers.counters()[f"kv_{kind}_compressed_blocks"]
        assert (num_compressed > 0) == bool(levels and kind != "host")
    finally:
        tiers.close()


def test_a_worker_with_another_head_finds_nothing_under_its_keys(
    engine: Engine, folder: Path, tmp_path: Path, expected: list
) -> None:
    tiers = join(engine, disk(engine, tmp_path))
    assert answer(engine, PROMPTS[0], "first") == expected[0]
    settled(tiers)
    tiers.close()
    for other, num_cached in ((small_engine(folder), 0), (engine_with(folder, "another"), 0), (engine, 96)):
        tiers = join(other, disk(other, tmp_path))
        if other is engine:
            evict_first(engine)
        assert cached_tokens(other, PROMPTS[0], "again") == (num_cached, expected[0])
        tiers.close()


@pytest.mark.parametrize("levels", [(), ("lossless",)], ids=["raw", "lossless"])
def test_blocks_of_a_model_with_windows_come_back_whole_and_others_are_not_kept(
    tmp_path: Path, levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.tiers.record_codec.choose_level", lambda *_: levels[0] if levels else "")
    monkeypatch.setattr("kv_transfer.tiers.record_codec.WriteRate.nbytes_per_s", 1.0)
    save_tiny(tmp_path / "model", "gpt_oss")
    layout = load_engine(settings(model=str(tmp_path / "model"))).layout
    wanted = {"kv_cache_nbytes": 12 * layout.block_nbytes, "keeps_whole_blocks": True, "max_batched_tokens": 32}
    engine = load_engine(settings(model=str(tmp_path / "model"), **wanted))
    expected = [answer(engine, prompt, "alone") for prompt in PROMPTS]
    tiers = join(engine, disk(engine, tmp_path / "disk"), levels=levels)
    try:
        for turn in range(2):
            for index, prompt in enumerate(PROMPTS):
                num_cached, tokens = cached_tokens(engine, prompt, f"{turn} {index}")
                assert (num_cached, tokens) == (turn * ((len(prompt) - 1) // 16 * 16), expected[index])
                settled(tiers)
                engine.check()
        num_kept = tiers.gauges()["kv_disk_blocks"]
        prompt = random_prompts(VOCAB, (100,), seed=9)[0]  # of whose window alone pages came
        reserved = engine.reserve(request("from elsewhere", prompt, greedy()))
        engine.release(reserved.request_id)
        assert engine.incoming_writer_ended(reserved.request_id, 96) == 96
        settled(tiers)
        needed = (96 - layout.first_needed(1, 100)) // 16
        assert tiers.gauges()["kv_disk_blocks"] == num_kept + needed < num_kept + 6
    finally:
        tiers.close()
