"""Tiers below several GPUs that share a model: what one number of them keeps, another one reads."""

from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.ids import RequestId
from engine.cuda.kv.tier_pages import PageLane
from engine.engine import Engine
from engine.sequence import Sequence
from kv_transfer.tiers.remote_store import open_remote_store
from tests.engine.device_engines import FUSIBLE
from tests.engine.driving import greedy, random_prompts
from tests.engine.test_device_team import DEVICES, engine_on
from tests.engine.tiny_models import VOCAB, save_tiny
from tests.worker.core.test_device_tiers import join_device, pinned_host
from tests.worker.core.tier_rig import answer, cached_tokens, settled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each GPU's process loads torch

SIZES = {"cpu": (1, 2, 4, 1), "cuda": (1, 2, 1)}
"""Numbers of GPUs: two each of four hold the same of two KV heads. One reads in the end what the others wrote."""
PROMPTS = random_prompts(VOCAB, (200, 150, 300, 170))
NUM_TOKENS = 70
"""How long an answer is: a whole block of it is decoded."""


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make gloo listen on the loopback interface; it would ask for the address of the host's name."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def _first(device: str) -> torch.device:
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def blocks_of(engine: Engine, tokens: list[int]) -> np.ndarray:
    """Return the cached blocks of tokens in the order of one GPU's pages; each set of GPUs has them."""
    size = engine.layout.block_size
    sequence = Sequence(RequestId("digests"), tokens, greedy())
    blocks = engine.pool.find_by_digest(sequence.extend_digests(size, len(tokens) // size))
    assert len(blocks) == len(tokens) // size
    copies = engine.transfer_pool.copies
    first, *others = (torch.cat([s[:, blocks].cpu() for s in shards], -1).numpy() for shards in copies)
    assert all(np.array_equal(first, other) for other in others)
    return first


@pytest.mark.parametrize("device", DEVICES)
def test_what_one_number_of_gpus_keeps_another_reads(tmp_path: Path, device: str) -> None:
    """Prompt and answer: every byte, and the greedy tokens of the turn after them."""
    save_tiny(tmp_path / "model", "llama", **FUSIBLE)
    turns: list[list[int]] = []
    kept: list[np.ndarray] = []
    expected: list[list[int]] = []
    for turn, (size, prompt) in enumerate(zip(SIZES[device], PROMPTS, strict=False)):
        with engine_on(_first(device), tmp_path / "model", size, kv_cache_nbytes=1 << 24) as engine:
            tiers = join_device(engine, pinned_host(engine, 20), open_remote_store(f"file://{tmp_path}"))
            for index, tokens in enumerate(turns):
                known = len(tokens) // 64 * 64
                assert cached_tokens(engine, [*tokens, 7], f"again {index}") == (known, expected[index])
                settled(tiers)
                assert np.array_equal(blocks_of(engine, tokens[:known]), kept[index])
            assert tiers.counters()["kv_store_loaded_blocks"] == sum(len(tokens) // 64 for tokens in turns)
            said = answer(engine, prompt, "new", greedy(NUM_TOKENS))
            settled(tiers)
            turns.append([*prompt, *said[:-1]])
            kept.append(blocks_of(engine, turns[-1]))
            expected.append(answer(engine, [*turns[-1], 7], f"next {turn}"))
            settled(tiers)
            assert tiers.counters()["kv_store_refused_blocks"] == tiers.counters()["kv_dropped_blocks"] == 0
            tiers.close()
            engine.check()


@pytest.mark.parametrize("device", DEVICES)
def test_a_follower_that_got_other_bytes_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """A page of one of several GPUs is not what was written: its block, and what is behind it, is computed."""
    save_tiny(tmp_path / "model", "llama", **FUSIBLE)
    with engine_on(_first(device), tmp_path / "model", 2, kv_cache_nbytes=1 << 24) as engine:
        expected = answer(engine, PROMPTS[0], "first")
        tiers = join_device(engine, pinned_host(engine, 20))
        engine.pool.release(engine.pool.allocate(engine.pool.num_available))
        assert answer(engine, PROMPTS[0], "kept") == expected
        settled(tiers)
        engine.pool.release(engine.pool.allocate(engine.pool.num_available))
        copy, bent = engine.transfer_pool.copies[0][1], []
        launch = PageLane._sum

        def bend(self: PageLane, blocks: list[int]) -> None:
            if not bent:
                bent.append(blocks[-1])
                copy[1, blocks[-1], 5] ^= 4
            launch(self, blocks)

        monkeypatch.setattr(PageLane, "_sum", bend)
        assert answer(engine, PROMPTS[0], "bent") == expected
        assert bent and tiers.counters()["kv_host_refused_blocks"] == 1
        tiers.close()
