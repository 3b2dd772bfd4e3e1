"""The tiers below a GPU's pool: equal tokens, and nothing that is wrong is believed.

On a CPU the device's adapter runs on the reference kernels; pages, their checksums and threads are the same ones.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.kv_store import BlockKey, KVStore
from engine.cache.load_plan import NewBlock
from engine.cuda.kv.tier_pages import PageLane, TierPages
from engine.engine import Engine
from kv_transfer.chunks.block_record import VERSION, max_record_nbytes
from kv_transfer.tiers.host_memory import HostMemoryTier, LentRecord
from kv_transfer.tiers.remote_store import open_remote_store
from tests.engine.device_engines import FUSIBLE, engine_of
from tests.engine.driving import greedy, random_prompts, request
from tests.engine.tiny_models import VOCAB, save_tiny
from tests.kv_transfer.tiers.block_samples import RECORD_NBYTES, buffers, key_of, record_of, worth_of
from tests.waiting import PATIENCE_S, until
from tests.worker.core.test_tier_compression import slow_store
from tests.worker.core.tier_rig import SLOW, answer, cached_tokens, disk, settled
from worker.core.block_load import BlockLoad
from worker.core.device_filler import NUM_LANES, DeviceFiller
from worker.core.device_saver import COPIED_AT_ONCE
from worker.core.fillers import aligned_nbytes
from worker.core.kv_tiers import KVTiers
from worker.core.record_check import RecordCheck
from worker.core.record_sources import ReaderThreads, RecordReader
from worker.core.tier_loader import NUM_THREADS

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(VOCAB, (420, 400, 385))
POOL_BLOCKS = 9
"""The pool holds one prompt: another one evicts it."""
ON_GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
)
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads are large enough for a GPU's attention."""
    path = tmp_path_factory.mktemp("device-model")
    save_tiny(path, "llama", **FUSIBLE)
    return path


def small_device_engine(folder: Path, device: str = "cpu") -> Engine:
    whole = engine_of(folder, DTYPES[device], device, kv_cache_nbytes=1 << 24)
    nbytes = POOL_BLOCKS * whole.layout.block_nbytes
    whole.close()
    return engine_of(folder, DTYPES[device], device, kv_cache_nbytes=nbytes)


def join_device(engine: Engine, *tiers: KVStore, levels: Sequence[str] = ()) -> KVTiers:
    pages = TierPages(engine.transfer_pool)
    joined = KVTiers(tiers, engine.layout, pages, engine.pool.generations, lambda: SLOW, lambda: None, levels=levels)
    engine.use_lower_tiers(joined)
    return joined


def pinned_host(engine: Engine, num_slots: int = 200) -> HostMemoryTier:
    nbytes = max_record_nbytes(engine.layout)
    return HostMemoryTier(num_slots * nbytes, nbytes, TierPages(engine.transfer_pool).pinned)


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, list[list[int]]]:
    """What a device's engine answers without tiers."""
    found: dict[str, list[list[int]]] = {}
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        engine = engine_of(folder, DTYPES[device], device, prefix_cache=False)
        found[device] = [answer(engine, prompt, str(index)) for index, prompt in enumerate(PROMPTS)]
        engine.close()
    return found


@pytest.fixture(params=["host", "disk", "store"])
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Engine], KVStore]:
    make: dict[str, Callable[[Engine], KVStore]] = {
        "host": pinned_host,
        "disk": lambda engine: disk(engine, tmp_path / "disk", is_direct=True),
        "store": lambda engine: open_remote_store(f"file://{tmp_path}"),
    }
    return make[request.param]


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_prompts_that_a_gpu_evicted_come_back_with_equal_tokens(
    device: str, make_tier: Callable[[Engine], KVStore], folder: Path, answers: dict[str, list[list[int]]]
):
    engine = small_device_engine(folder, device)
    tiers = join_device(engine, make_tier(engine))
    for turn in range(3):
        for index, prompt in enumerate(PROMPTS):
            num_cached, tokens = cached_tokens(engine, prompt, f"{turn} {index}")
            assert tokens == answers[device][index]
            assert num_cached == (0 if turn == 0 else (len(prompt) - 1) // 64 * 64)
            settled(tiers)
    assert tiers.counters()["kv_loaded_prompts"] == 2 * len(PROMPTS)
    tiers.close()
    engine.close()


def test_a_gpu_that_could_not_be_used_at_first_costs_those_blocks_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    faults = [RuntimeError("no context")]

    def enter(_: TierPages) -> None:
        if faults:
            raise faults.pop()

    monkeypatch.setattr(TierPages, "enter", enter)
    engine = small_device_engine(folder)
    tiers = join_device(engine, pinned_host(engine))
    for index, prompt in enumerate(PROMPTS):
        answer(engine, prompt, str(index))
        settled(tiers)
    assert 0 < tiers.counters()["kv_host_dropped_blocks"] <= COPIED_AT_ONCE < tiers.gauges()["kv_host_blocks"]
    assert "copying KV from the GPU to the host tier failed" in caplog.text
    tiers.close()
    engine.close()


def test_the_next_turn_finds_prompt_and_answer_below_a_gpu(make_tier: Callable[[Engine], KVStore], folder: Path):
    """A whole block of the answer, and the one in which it begins, are decoded; the pool has lost both by then."""
    alone = engine_of(folder, "float32", "cpu", prefix_cache=False)
    first = answer(alone, PROMPTS[2], "first", greedy(80))
    turn = [*PROMPTS[2], *first, *PROMPTS[0][:9]]
    expected = answer(alone, turn, "next")
    alone.close()
    engine = small_device_engine(folder)
    tiers = join_device(engine, make_tier(engine))
    assert answer(engine, PROMPTS[2], "first", greedy(80)) == first
    settled(tiers)
    num_known = (len(PROMPTS[2]) + 79) // 64 * 64
    assert cached_tokens(engine, turn, "hit") == (num_known, expected)
    settled(tiers)
    for index, other in enumerate(PROMPTS[:2]):
        answer(engine, other, f"other {index}")
        settled(tiers)
    assert cached_tokens(engine, turn, "loaded") == (num_known, expected)
    assert tiers.counters()["kv_loaded_blocks"] == num_known // 64
    tiers.close()
    engine.close()


def test_every_level_of_a_gpus_tiers_serves_what_another_lost(folder: Path, tmp_path: Path, answers: dict):
    """Memory holds the first blocks only: the rest of the prompt comes from the disk."""
    engine = small_device_engine(folder)
    tiers = join_device(engine, pinned_host(engine, 3), disk(engine, tmp_path))
    for turn in range(2):
        for index, prompt in enumerate(PROMPTS):
            assert answer(engine, prompt, f"{turn} {index}") == answers["cpu"][index]
            settled(tiers)
    counters = tiers.counters()
    assert counters["kv_disk_hit_blocks"] > 0
    assert counters["kv_disk_refused_blocks"] == counters["kv_host_refused_blocks"] == 0
    tiers.close()


@pytest.mark.parametrize("where", ["head", "payload"])
def test_bits_that_flip_on_the_disk_of_a_gpu_are_computed_again(
    where: str, folder: Path, tmp_path: Path, answers: dict
):
    """Each file in turn: what is before it is loaded, it and what is behind it is computed."""
    engine = small_device_engine(folder)
    tiers = join_device(engine, disk(engine, tmp_path))
    drawn = np.random.default_rng(1)
    answer(engine, PROMPTS[0], "first")
    settled(tiers)
    files = sorted(tmp_path.glob(f"v{VERSION}/*/*/*.kv"))
    for index, file in enumerate(files):
        for other in PROMPTS[1:]:  # one alone leaves some blocks in the pool
            answer(engine, other, f"between {index} {len(other)}")
            settled(tiers)
        data = bytearray(file.read_bytes())
        head = len(data) - engine.layout.block_nbytes
        place = drawn.integers(head) if where == "head" else drawn.integers(head, len(data))
        data[place] ^= 1 << int(drawn.integers(8))
        file.write_bytes(data)
        assert answer(engine, PROMPTS[0], f"again {index}") == answers["cpu"][0]
        settled(tiers)
    assert tiers.counters()["kv_disk_refused_blocks"] == len(files)
    tiers.close()


class FaultyArena(HostMemoryTier):
    """It flips a bit of what it lends, or lends what it has under another key, or nothing."""

    def __init__(self, engine: Engine) -> None:
        nbytes = max_record_nbytes(engine.layout)
        super().__init__(200 * nbytes, nbytes)
        self.drawn = np.random.default_rng(3)
        self.num_faults = 0

    def lend(self, keys: Sequence[BlockKey]) -> list[LentRecord]:
        lent = super().lend(keys)
        for index, (slot, record) in enumerate(lent):
            fault = self.drawn.integers(8)
            self.num_faults += fault < 3
            if fault == 0:
                record[self.drawn.integers(len(record))] ^= 1 << int(self.drawn.integers(8))
            elif fault == 1:
                lent[index] = slot, lent[0][1]
            elif fault == 2:
                self.give_back(slot for slot, _ in lent[index:])
                return lent[:index]
        return lent


def test_no_fault_of_the_memory_below_a_gpu_is_a_wrong_token(folder: Path, answers: dict):
    engine = small_device_engine(folder)
    tier = FaultyArena(engine)
    tiers = join_device(engine, tier)
    for turn in range(12):
        for index, prompt in enumerate(PROMPTS):
            assert answer(engine, prompt, f"{turn} {index}") == answers["cpu"][index]
            settled(tiers)
    assert tier.num_faults > 20
    assert engine.stats().free_tokens == engine.capacity_tokens
    tiers.close()


def test_a_copy_into_pages_that_went_wrong_is_found_on_the_device(
    folder: Path, answers: dict, monkeypatch: pytest.MonkeyPatch
):
    """The record is right, and the block that arrives is not: the device's own checksums tell."""
    engine = small_device_engine(folder)
    tiers = join_device(engine, pinned_host(engine))
    for index, prompt in enumerate(PROMPTS):
        answer(engine, prompt, f"fill {index}")
        settled(tiers)
    copy = PageLane._copy

    def bent(self: PageLane, payload: np.ndarray, block: int, is_in: bool) -> None:
        copy(self, payload, block, is_in)
        if is_in:
            self._pool.copies[0][0][1, block, 5] ^= 4

    monkeypatch.setattr(PageLane, "_copy", bent)
    assert answer(engine, PROMPTS[0], "bent") == answers["cpu"][0]
    assert tiers.counters()["kv_host_refused_blocks"] >= 1
    assert tiers.counters()["kv_host_loaded_blocks"] == 0
    tiers.close()


class GatedTier(HostMemoryTier):
    """What it lends is used when it is let go."""

    def lend(self, keys: Sequence[BlockKey]) -> list[LentRecord]:
        lent = super().lend(keys)
        self.has_lent.set()
        self.may_go.wait()
        return lent

    def __init__(self, engine: Engine) -> None:
        nbytes = max_record_nbytes(engine.layout)
        super().__init__(200 * nbytes, nbytes)
        self.has_lent, self.may_go = threading.Event(), threading.Event()


def test_nothing_is_written_to_the_pages_of_a_load_that_was_cancelled(folder: Path, answers: dict):
    engine = small_device_engine(folder)
    tier = GatedTier(engine)
    tiers = join_device(engine, tier)
    tier.may_go.set()
    for index, prompt in enumerate(PROMPTS):
        answer(engine, prompt, f"fill {index}")
        settled(tiers)
    tier.may_go.clear()
    tier.has_lent.clear()
    gone = request("gone", PROMPTS[0], greedy())
    engine.submit(gone)
    engine.step()
    assert tier.has_lent.wait(30)
    engine.release(gone.request_id)
    engine.check()
    before = engine.transfer_pool.memory.tensor.clone()
    tier.may_go.set()
    settled(tiers)
    tiers.close()
    assert torch.equal(engine.transfer_pool.memory.tensor, before)
    assert tier.stats()["hit_blocks"] > 0
    assert engine.stats().free_tokens == engine.capacity_tokens


def test_a_read_that_hangs_keeps_no_copy_on_its_way(
    folder: Path, tmp_path: Path, answers: dict, monkeypatch: pytest.MonkeyPatch
):
    """A load is given up at once, for nothing writes to its pages: the engine's thread does not wait for a disk."""
    engine = small_device_engine(folder)
    tier = disk(engine, tmp_path)
    tiers, read = join_device(engine, tier), tier.load
    for index, prompt in enumerate(PROMPTS):
        answer(engine, prompt, f"fill {index}")
        settled(tiers)
    first, is_known, may_read = list[BlockKey](), threading.Event(), threading.Event()

    def hang(keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[int]:
        """Read the first block, and no other."""
        assert is_known.wait(PATIENCE_S) and (keys[0] in first or may_read.wait(PATIENCE_S))
        return read(keys, into)

    monkeypatch.setattr(tier, "load", hang)
    monkeypatch.setattr("worker.core.block_load.STOP_TIMEOUT_S", 0.1)
    gone = request("gone", PROMPTS[0], greedy())
    engine.submit(gone)
    engine.step()
    load = tiers._loads[gone.request_id]
    first.append(load.keys[0])
    is_known.set()
    until(lambda: load.num_done == 1, timeout_s=PATIENCE_S / 3)
    engine.release(gone.request_id)
    engine.check()
    may_read.set()
    settled(tiers)
    assert cached_tokens(engine, PROMPTS[0], "again") == (384, answers["cpu"][0])
    tiers.close()
    engine.close()


def test_a_block_of_a_gpu_that_is_overwritten_is_not_stored(folder: Path):
    engine = small_device_engine(folder)
    tiers = join_device(engine, pinned_host(engine))
    answer(engine, PROMPTS[0], "a")
    settled(tiers)
    stored = tiers.counters()["kv_host_stored_blocks"]
    assert stored == len(PROMPTS[0]) // 64
    tiers.offer(NewBlock(0, engine.pool.generations[0] - 1, b"stale", None, 0))
    settled(tiers)
    assert tiers.counters()["kv_overwritten_blocks"] == 1
    assert tiers.counters()["kv_host_stored_blocks"] == stored
    tiers.close()


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_lane_copies_whole_blocks_and_sums_them_up(device: str, count: int, folder: Path):
    engine = small_device_engine(folder, device)
    pages = TierPages(engine.transfer_pool)
    lane, nbytes = pages.lane(8), engine.layout.block_nbytes
    memory = np.frombuffer(pages.pinned(2 * count * nbytes), np.uint8).reshape(2, count, nbytes)
    memory[0] = np.random.default_rng(count).integers(0, 256, (count, nbytes), dtype=np.uint8)
    blocks = np.random.default_rng(2).permutation(POOL_BLOCKS - 1)[:count].tolist()
    lane.fill(list(memory[0]), blocks)
    arrived = lane.wait().copy()
    lane.fetch(blocks, list(memory[1]))
    assert np.array_equal(lane.wait(), arrived) and arrived.shape == (count, pages.num_planes)
    assert np.array_equal(memory[0], memory[1])
    engine.close()


class SlowTier(HostMemoryTier):
    """Its reads end in an order of their own."""

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[int]:
        threading.Event().wait(0.001 * (keys[0][0] % 5))
        return super().load(keys, into)


@pytest.mark.parametrize("num_held", [0, 5, 24])
def test_a_reader_gives_records_in_order_up_to_the_first_that_is_missing(num_held: int):
    tier = SlowTier(100 * RECORD_NBYTES, RECORD_NBYTES)
    keys = [key_of(number) for number in range(24)]
    for number in [*range(num_held), *range(num_held + 1, 24)]:
        tier.store(keys[number], record_of(number), worth_of(number))
    reader = RecordReader(ReaderThreads(tier, 4), buffers(7))
    for _ in range(2):  # all buffers are there again for the next load
        found: list[bytes] = []
        for held in reader.batches(keys, 3):
            assert 1 <= len(held) <= 3
            found += [bytes(record) for _, record in held]
            reader.give_back(held)
        assert found == [bytes(record_of(number)) for number in range(num_held)]
    batches = reader.batches(keys, 2)
    reader.give_back(next(batches, []))
    batches.close()  # a load that is over early
    assert sorted(reader._free) == list(range(7))
    reader.close()


def test_buffers_for_reads_past_the_page_cache_are_aligned():
    assert [aligned_nbytes(nbytes) for nbytes in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_records_that_lost_something_come_to_a_gpu_only_for_who_takes_that(
    folder: Path, tmp_path: Path, answers: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
):
    """A store that is slow has them at a level; whoever names it gets them, and nobody else."""
    engine = small_device_engine(folder)
    tiers = join_device(engine, slow_store(f"file://{tmp_path}", monkeypatch), levels=["lossless", "4bit"])
    for index, prompt in enumerate(PROMPTS):
        cached_tokens(engine, prompt, f"first {index}", "4bit")
        settled(tiers)
    assert tiers.counters()["kv_store_compressed_blocks"] > 0
    found = [cached_tokens(engine, prompt, f"lossy {index}", "4bit")[0] for index, prompt in enumerate(PROMPTS)]
    settled(tiers)
    assert found == [(len(prompt) - 1) // 64 * 64 for prompt in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        num_cached, tokens = cached_tokens(engine, prompt, f"exact {index}")
        assert tokens == answers["cpu"][index] and num_cached < found[index]
        settled(tiers)
    assert tiers.counters()["kv_store_refused_blocks"] == 0
    tiers.close()


def fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("where", ["read", "check", "land"])
def test_what_nobody_foresaw_below_a_gpu_keeps_no_buffer_lane_or_page(
    where: str, folder: Path, tmp_path: Path, answers: dict, monkeypatch: pytest.MonkeyPatch
):
    engine, loads = small_device_engine(folder), list[BlockLoad]()
    tier = disk(engine, tmp_path)
    tiers = join_device(engine, tier)
    for index, prompt in enumerate(PROMPTS):
        answer(engine, prompt, f"fill {index}")
        settled(tiers)
    end = KVTiers._end
    monkeypatch.setattr(KVTiers, "_end", lambda self, load, now: loads.append(load) or end(self, load, now))
    monkeypatch.setattr("worker.core.block_load.STOP_TIMEOUT_S", 0.1)
    with monkeypatch.context() as fault:
        whole, name = {"read": (tier, "load"), "check": (RecordCheck, "stated_kv_of"), "land": (PageLane, "wait")}[
            where
        ]
        fault.setattr(whole, name, fail)
        for index, prompt in enumerate(PROMPTS):
            assert answer(engine, prompt, f"failing {index}") == answers["cpu"][index]
            settled(tiers)
    assert len(loads) == len(PROMPTS) > NUM_THREADS
    for load in loads:
        load.stop()
    for filler in tiers._loaders["disk"]._fillers:
        assert isinstance(filler, DeviceFiller) and isinstance(filler._source, RecordReader)
        assert sorted(filler._source._free) == list(range(len(filler._source._buffers)))
        assert len(filler._lanes) == NUM_LANES
    assert cached_tokens(engine, PROMPTS[0], "well") == (384, answers["cpu"][0])
    tiers.close()
    engine.close()
