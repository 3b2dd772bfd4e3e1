"""Recurrent layers through a pair: the last state moves, a conversation's next turn is found, damage is noticed.

Real engines and links in one process.
"""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bench.models.transformers_oracle import greedy as oracle_greedy
from contracts.layout import KVLayout
from contracts.node import WorkerRole
from engine.loader import load_engine
from kv_transfer.data_path.staging import HostStaging
from tests.engine.driving import answers, greedy, random_prompts, settings
from tests.engine.tiny_models import VOCAB, save_tiny
from tests.path.cores import Cores
from tests.path.test_path_reuse import Pool
from tests.path.test_path_windows import SIZE, num_held
from tests.waiting import until

pytestmark = pytest.mark.slow

FEW: dict[str, Any] = {"kv_cache_mib": 1, "max_num_seqs": 4}
PROMPTS = random_prompts(VOCAB, (5, 64, 97, 230))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """A tiny model's folder, and what transformers answers with it."""
    folder = tmp_path_factory.mktemp("states")
    reference = save_tiny(folder, "qwen3_5")
    return str(folder), [oracle_greedy(reference, prompt, 12) for prompt in PROMPTS]


def moved_nbytes(layout: KVLayout, num_tokens: int) -> int:
    """Return the bytes of a handoff by their formula: one state, and K and V of the layers that attend.

    A state is of each recurrent layer: a matrix of each value head, and the last inputs of the convolution.
    """
    full, state = layout.groups
    keys, heads, key_dim, value_dim, width = 2, 4, 16, 24, 4
    numbers = heads * key_dim * value_dim + (width - 1) * (2 * keys * key_dim + heads * value_dim)
    assert state.block_nbytes == 2 * numbers * 4
    return state.block_nbytes + -(-num_tokens // SIZE) * SIZE * 2 * full.num_kv_heads * full.head_dim * 4


@pytest.mark.parametrize("transfer", ["ucx", "shm", "tcp"])
def test_a_pair_answers_as_transformers_and_moves_the_last_state_alone(model, transfer: str) -> None:
    folder, expected = model
    with Cores(folder, transfer, **FEW) as pair:
        nbytes = 0
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert pair.answers([prompt], greedy(12)) == [answer]
            told = sum(link.nbytes for link in pair.decode.node.stats())
            assert told - nbytes == moved_nbytes(pair.decode.engine.layout, len(prompt))
            nbytes = told
        assert pair.answers(PROMPTS, greedy(12)) == expected
        assert num_held(pair.prefill.engine) == num_held(pair.decode.engine) == 0


def test_a_damaged_state_is_found_by_its_checksum(model, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, expected = model
    with Cores(folder, "tcp", **FEW) as pair:
        size, pack = pair.prefill.engine.layout.groups[1].page_nbytes(1), HostStaging.pack

        def damaging(staging: HostStaging, units: np.ndarray, payload: np.ndarray, checksum: int) -> int:
            found = pack(staging, units, payload, checksum)
            if staging.unit_nbytes == size:
                payload[100] ^= 4
            return found

        with monkeypatch.context() as patched:
            patched.setattr(HostStaging, "pack", damaging)
            with pytest.raises(AssertionError, match="checksum"):
                pair.answers(PROMPTS[:1], greedy(12))
        assert pair.answers(PROMPTS, greedy(12)) == expected


def test_turns_of_a_conversation_find_the_state_where_the_last_answer_ended(model) -> None:
    """It was decoded by another worker, which sends the KV of the answer, and one state."""
    folder, _ = model
    pool = Pool(folder, "tcp", WorkerRole.PREFILL, WorkerRole.MIXED, **FEW)
    prefill, mixed = (pool.workers[role] for role in (WorkerRole.PREFILL, WorkerRole.MIXED))
    try:
        until(lambda: prefill.node.ensure_link(mixed.ref) and mixed.node.ensure_link(prefill.ref))
        alone, text = load_engine(settings(model=folder)), list(PROMPTS[2])
        text += [*pool.ask(replace(pool.job(text, mixed, mixed), sampling=greedy(16))).tokens, *[7] * 5]
        for turn in range(10):
            answer = pool.ask(replace(pool.job(text, prefill, mixed, mixed), sampling=greedy(16)))
            assert answer.tokens == answers(alone, [text], greedy(16))[0]
            assert answer.cached == (len(text) - 6) // SIZE * SIZE >= 0.9 * (len(text) - 5)
            text += [*answer.tokens, *[8 + turn] * 5]
        pool.assert_clean()
        assert num_held(prefill.engine) == num_held(mixed.engine) == 0
    finally:
        pool.close()
