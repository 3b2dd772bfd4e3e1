"""The benchmark of tiers below a GPU's KV cache.

`python -m bench.engine.gpu_kv_tiers [--out FILE] [--folder DIR] [--prompt 8192] [--long 32768]`

One engine with random weights in Llama-8B's shape, FP8. The prompts are of so many tokens, which tiers hold, and of
NEW_TURN more, which nobody does. First it is shown that KV that comes back is the same: every
byte of a prompt's blocks, and greedy tokens equal to those of a hit in the GPU's own cache, where the same tokens are
computed. Then there are first tokens of a prompt: computed, hit, from page-locked memory, from disk; a long prompt from
disk beside the rate at which plain threads read the same files past the page cache, in turns; and the gaps between
tokens of 32 running answers, while prompts come that are hit, are loaded, are computed, and are computed and saved.
"""

import argparse
import gc
import logging
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from bench.engine.gpu import load, settled
from bench.report.result import ResultRow, shown, write_result
from contracts.ids import RequestId
from contracts.kv_store import KVStore
from contracts.sampling import SamplingParams
from engine.cuda.kv.tier_pages import TierPages
from engine.engine import Engine
from engine.messages import EngineRequest, StepOutput
from engine.sequence import Sequence as EngineSequence
from kernels import caps
from kv_transfer.chunks.block_record import VERSION, max_record_nbytes
from kv_transfer.tiers.disk import DiskTier
from kv_transfer.tiers.host_memory import HostMemoryTier
from worker.core.fillers import aligned_nbytes
from worker.core.kv_tiers import KVTiers

GIB = 1 << 30
SWITCH_S = 0.0002
"""How often threads take turns, in seconds, as in an engine core."""
NEW_TURN = 16
NUM_ANSWERS, CONTEXT = 32, 1024
NUM_PROMPTS, NUM_COMPUTED, STEPS_BETWEEN, ROUNDS = 20, 4, 12, 4
READERS = 16
MOST_GAP, MOST_TTFT_MS, LEAST_DISK_SHARE = 1.05, 18.0, 0.8
_log, _random = logging.getLogger(__name__), np.random.default_rng(7)


def main() -> None:
    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--long", type=int, default=32768)
    parser.add_argument("--pool-gib", type=float, default=24.0)
    parser.add_argument("--host-gib", type=float, default=24.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    sizes = {"kv_cache_nbytes": int(args.pool_gib * GIB), "max_model_len": args.long + 128, "max_mixed_tokens": 1024}
    engine = load("float8", args.model, prefix_cache=True, **sizes)
    with settled(engine), tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run = GpuTiersRun(engine, Path(folder), args.host_gib)
        with closing(run):
            rows = run.first_tokens(args.prompt)
            rows += run.gaps(args.prompt, args.rounds)
            rows += run.long_prompt(args.long)
    config = {
        "model": f"{args.model}'s shape, random weights, float8",
        "card": caps.detect().name,
        "rounds": args.rounds,
    }
    path = write_result(args.out, "gpu-kv-tiers", rows, config)
    _log.info("%s", path.with_suffix(".md").read_text(encoding="utf-8"))


class GpuTiersRun:
    """An engine, and two sets of tiers of which it uses one at a time."""

    def __init__(self, engine: Engine, folder: Path, host_gib: float) -> None:
        self.engine, self.folder = engine, folder
        self._woken = threading.Event()
        self.tokens_per_s = 0.0
        self._num_requests = 0
        self.pages, layout = TierPages(engine.transfer_pool), engine.layout
        self._record_nbytes = max_record_nbytes(layout)
        begin = time.perf_counter()
        memory = HostMemoryTier(int(host_gib * GIB), self._record_nbytes, self.pages.pinned)
        _log.info("%.1f GiB page-locked in %.1f s", host_gib, time.perf_counter() - begin)
        self.disk_tier = DiskTier(folder, layout.shared_id.hex(), 64 * GIB, is_direct=True)
        assert self.disk_tier.wait_until_indexed(60)
        # In one piece, as the tiers' own buffers are: a disk reads less fast into memory of small pages.
        self._raw_memory = self.pages.pinned(READERS * aligned_nbytes(self._record_nbytes))
        self.host, self.disk = self._join(memory), self._join(self.disk_tier)

    def _join(self, tier: KVStore) -> KVTiers:
        generations = self.engine.pool.generations
        return KVTiers([tier], self.engine.layout, self.pages, generations, lambda: self.tokens_per_s, self._woken.set)

    def close(self) -> None:
        self.host.close()
        self.disk.close()

    # One request alone.

    def use(self, tiers: KVTiers | None) -> None:
        """Let the engine use these tiers, or none."""
        self.engine.scheduler.lower_tiers = self.engine._prefix_cache.lower_tiers = tiers  # type: ignore[assignment]

    def submit(self, prompt: Sequence[int], max_tokens: int) -> RequestId:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        request_id = RequestId(str(self._num_requests))
        self.engine.submit(EngineRequest(request_id, list(prompt), sampling))
        return request_id

    def step(self) -> StepOutput:
        self._woken.clear()
        output = self.engine.step()
        if output == StepOutput():
            self._woken.wait(0.05)
        return output

    def answer(self, prompt: Sequence[int], max_tokens: int = 1) -> tuple[float, int, float, list[int]]:
        """Return seconds to the first token, tokens that were cached, seconds of the load, the tokens."""
        begin = time.perf_counter()
        request_id = self.submit(prompt, max_tokens)
        ttft_s, num_cached, load_s, tokens = 0.0, 0, 0.0, list[int]()
        while self.engine.has_work():
            output = self.step()
            for started in output.started:
                num_cached, load_s = started.cached_tokens, started.load_s
            tokens += [told.token.token_id for told in output.sampled if told.request_id == request_id]
            if tokens and not ttft_s:
                ttft_s = time.perf_counter() - begin
        return ttft_s, num_cached, load_s, tokens

    def evict(self) -> None:
        """Empty the GPU's prefix cache."""
        pool = self.engine.pool
        pool.release(pool.allocate(pool.num_available))

    def settle(self, tiers: KVTiers) -> None:
        """Wait until all that is new is kept. Raises TimeoutError."""
        deadline = time.monotonic() + 120
        while not tiers.is_idle:
            if time.monotonic() > deadline:
                raise TimeoutError("the tiers are not done within 120 s")
            time.sleep(0.002)

    def bytes_of(self, prompt: Sequence[int]) -> np.ndarray:
        """Return the KV of a prompt's cached blocks."""
        size = self.engine.layout.block_size
        blocks = self.engine.pool.find_by_digest(_digests(self.engine, prompt))
        assert len(blocks) == (len(prompt) - 1) // size, (len(blocks), len(prompt))
        pool = self.engine.transfer_pool
        planes = pool.memory.tensor.view(pool.num_planes, pool.num_blocks + 1, pool.page_nbytes)
        return planes.index_select(1, torch.tensor(blocks, device=planes.device)).cpu().numpy()

    # The parts.

    def first_tokens(self, length: int) -> list[ResultRow]:
        """Measure first tokens of prompts of this length, after showing that what comes back is the same."""
        self.use(None)
        prompts = [random_tokens(length + NEW_TURN) for _ in range(8)]
        computed: list[float] = []
        for prompt in [random_tokens(length + NEW_TURN), *prompts]:
            computed.append(self.answer(prompt)[0])
            self.evict()
        computed = computed[1:]
        self.tokens_per_s = length / statistics.median(computed)
        taken: dict[str, list[float]] = {"computed": computed, "hit": [], "host": [], "disk": []}
        loads: dict[str, list[float]] = {"host": [], "disk": []}
        for name, tiers in (("host", self.host), ("disk", self.disk)):
            self.use(tiers)
            if name == "disk":  # it pays whatever this disk's rate is: what it gives is to be seen
                self.tokens_per_s /= 50
            for number, prompt in enumerate(prompts):
                first = self.answer(prompt, 8)[3]
                self.settle(tiers)
                hit_s, num_hit, _, hit = self.answer(prompt, 8)
                assert num_hit == length
                whole = self.bytes_of(prompt) if number == 0 else None
                self.evict()
                if name == "disk":
                    os.sync()
                loaded_s, num_loaded, load_s, loaded = self.answer(prompt, 8)
                assert num_loaded == num_hit, f"{num_loaded} tokens came from {name}, not {num_hit}: {tiers.counters()}"
                assert loaded == hit, f"greedy tokens after a load differ: {loaded}, {hit}"
                if whole is not None:
                    assert np.array_equal(self.bytes_of(prompt), whole), "KV that came back differs"
                    _log.info(
                        "%s: the KV of %d tokens is the same; computed %s, loaded %s", name, num_loaded, first, loaded
                    )
                    self.evict()
                    continue  # the first pays for what is opened
                self.settle(tiers)
                self.evict()
                taken["hit"].append(hit_s)
                taken[name].append(loaded_s)
                loads[name].append(load_s)
            if name == "disk":
                self.tokens_per_s *= 50
        host_rate = self.pinned_rate()
        nbytes = length * self.engine.layout.block_nbytes // self.engine.layout.block_size
        computing_ms = statistics.median(computed) * 1e3
        hit_ms = statistics.median(taken["hit"]) * 1e3
        rows = [
            ResultRow(
                "first token", statistics.median(values) * 1e3, "ms",
                {"tokens": length, "from": name, "slowest": round(max(values) * 1e3, 2), "runs": len(values)}
                | ({"at most": MOST_TTFT_MS} if name == "host" else {}),
                limit=nbytes / host_rate * 1e3 + hit_ms if name == "host" else None,
                peer="computing it" if name != "computed" else None,
                peer_value=computing_ms if name != "computed" else None,
            )
            for name, values in taken.items()
        ]  # fmt: skip
        rows += [
            ResultRow(
                "rate of a load", nbytes / statistics.median(values) / 1e9, "GB/s",
                {"tokens": length, "from": name}, limit=host_rate / 1e9 if name == "host" else None,
            )
            for name, values in loads.items()
        ]  # fmt: skip
        return [shown(row) for row in rows]

    def pinned_rate(self) -> float:
        """Return bytes a second of one large copy from page-locked memory."""
        memory = torch.from_numpy(np.frombuffer(self.pages.pinned(512 << 20), np.uint8))
        there = torch.empty(len(memory), dtype=torch.uint8, device="cuda")
        taken: list[float] = []
        for _ in range(8):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            there.copy_(memory, non_blocking=True)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - begin)
        return len(memory) / statistics.median(taken)

    def gaps(self, length: int, rounds: int) -> list[ResultRow]:
        """Measure the gaps of running answers beside prompts that are hit, loaded, computed, or saved."""
        self.use(self.host)
        prompts = [random_tokens(length + NEW_TURN) for _ in range(NUM_PROMPTS)]
        for prompt in prompts:
            self.answer(prompt)
            self.settle(self.host)
        answers = [self.submit(random_tokens(CONTEXT), 30_000) for _ in range(NUM_ANSWERS)]
        seen: set[str] = set()
        while len(seen) < NUM_ANSWERS:
            seen |= {told.request_id for told in self.step().sampled}
        found: dict[str, list[float]] = {"none": [], "hit": [], "loaded": [], "computed": [], "computed and saved": []}
        counts = self.host.counters()
        gc.collect()
        for number in range(rounds):
            found["none"] += self.run_beside([], None)
            self.evict()
            found["loaded"] += self.run_beside(prompts, self.host)
            found["hit"] += self.run_beside(prompts, self.host)
            saved = ("computed", None), ("computed and saved", self.host)
            for name, tiers in saved if number % 2 else saved[::-1]:
                self.evict()
                fresh = [random_tokens(length) for _ in range(NUM_COMPUTED)]
                found[name] += self.run_beside(fresh, tiers, 5 * STEPS_BETWEEN)
                self.settle(self.host)
        loaded = self.host.counters()["kv_loaded_prompts"] - counts["kv_loaded_prompts"]
        for request_id in answers:
            self.engine.release(request_id)
        while self.engine.has_work():
            self.step()
        self.evict()
        _log.info("%d of %d prompts were loaded beside the answers", loaded, rounds * NUM_PROMPTS)
        assert loaded >= rounds * NUM_PROMPTS, self.host.counters()
        peers = {"loaded": "hit", "computed and saved": "computed"}
        rows: list[ResultRow] = []
        for quantile, name in ((0.5, "p50"), (0.99, "p99")):
            for kind, values in found.items():
                peer = peers.get(kind)
                rows.append(
                    ResultRow(
                        f"gap {name} of {NUM_ANSWERS} answers", float(np.quantile(values, quantile)) * 1e3, "ms",
                        {"prompts beside them": kind, "tokens": length, "gaps": len(values)}
                        | ({"at most": f"{MOST_GAP} x"} if peer else {}),
                        peer=f"prompts that are {peer}" if peer else None,
                        peer_value=float(np.quantile(found[peer], quantile)) * 1e3 if peer else None,
                    )
                )  # fmt: skip
        return [shown(row) for row in rows]

    def run_beside(
        self, prompts: Sequence[Sequence[int]], tiers: KVTiers | None, steps_between: int = STEPS_BETWEEN
    ) -> list[float]:
        """Return the gaps between the answers' steps while a prompt comes every few of them."""
        self.use(tiers)
        waiting, gaps = list(prompts), list[float]()
        for _ in range(4):
            self.step()
        last = time.perf_counter()
        for number in range((len(prompts) or NUM_PROMPTS) * steps_between):
            if waiting and number % steps_between == 0:
                self.submit(waiting.pop(0), 1)
            if self.step().sampled:
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
        return gaps

    def long_prompt(self, length: int) -> list[ResultRow]:
        """Measure a long prompt from disk beside plain threads that read the same files."""
        self.use(None)
        computing_s = self.answer(random_tokens(length))[0]
        self.evict()
        self.use(self.disk)
        rates: dict[str, list[float]] = {"load": [], "disk": []}
        ttft: list[float] = []
        num_blocks = length // self.engine.layout.block_size
        self.tokens_per_s = length / 60  # it pays whatever this disk's rate is
        prompts = [random_tokens(length + NEW_TURN) for _ in range(2)]
        for prompt in prompts:
            self.answer(prompt)
            self.settle(self.disk)
            self.evict()
        os.sync()
        for number in range(6):
            # Each file is read by both in turns: whatever stands behind this disk may keep what was read lately.
            prompt = prompts[number % 2]
            rates["disk"].append(self.raw_rate(prompts[1 - number % 2]))
            ttft_s, num_loaded, load_s, _ = self.answer(prompt)
            assert num_loaded == num_blocks * self.engine.layout.block_size, self.disk.counters()
            rates["load"].append(num_blocks * self._record_nbytes / load_s)
            ttft.append(ttft_s)
            self.evict()
        _log.info(
            "disk GB/s by turns: %s", {name: [round(rate / 1e9, 2) for rate in found] for name, found in rates.items()}
        )
        disk = statistics.median(rates["disk"])
        rows = [
            ResultRow(
                "rate of a load", statistics.median(rates["load"]) / 1e9, "GB/s",
                {"tokens": length, "from": "disk", "at least": f"{LEAST_DISK_SHARE} x"},
                limit=disk / 1e9, peer="threads that read the same files", peer_value=disk / 1e9,
            ),
            ResultRow(
                "first token", statistics.median(ttft) * 1e3, "ms", {"tokens": length, "from": "disk"},
                peer="computing it", peer_value=computing_s * 1e3,
            ),
        ]  # fmt: skip
        return [shown(row) for row in rows]

    def raw_rate(self, prompt: Sequence[int]) -> float:
        """Return bytes a second of threads that only read a prompt's records, past the page cache."""
        keys = [self.disk._key(digest) for digest in _digests(self.engine, prompt)]
        places = [
            self.folder / f"v{VERSION}" / self.disk_tier._places[key] for key in keys if key in self.disk_tier._places
        ]
        nbytes = aligned_nbytes(self._record_nbytes)
        free = queue.SimpleQueue[memoryview]()
        for start in range(0, READERS * nbytes, nbytes):
            free.put(self._raw_memory[start : start + nbytes])

        def read(place: Path) -> int:
            buffer = free.get()
            file = os.open(place, os.O_RDONLY | os.O_DIRECT)
            try:
                return os.readv(file, [buffer])
            finally:
                os.close(file)
                free.put(buffer)

        with ThreadPoolExecutor(READERS) as pool:
            begin = time.perf_counter()
            total = sum(pool.map(read, places))
            return total / (time.perf_counter() - begin)


def random_tokens(count: int) -> list[int]:
    return _random.integers(0, 100_000, count).tolist()


def _digests(engine: Engine, prompt: Sequence[int]) -> list[bytes]:
    size = engine.layout.block_size
    sampling = SamplingParams(max_tokens=1, seed=0)
    return EngineSequence(RequestId("digests"), list(prompt), sampling).extend_digests(size, (len(prompt) - 1) // size)


if __name__ == "__main__":
    main()
