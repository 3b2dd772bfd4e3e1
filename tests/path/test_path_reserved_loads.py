"""Decode has blocks of a prompt in its own tiers: they are loaded where its link is slower, and the rest is sent."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from contracts.errors import PeerLost
from contracts.events import Event, Failed, Moved
from contracts.ids import Epoch
from contracts.node import WorkerRole
from contracts.request import Cancel
from contracts.sampling import SamplingParams
from kv_transfer.chunks.block_record import max_record_nbytes
from kv_transfer.tiers.host_memory import HostMemoryTier
from testing.paced_proxy import PacedProxy
from tests.e2e import tiny
from tests.engine.device_engines import FUSIBLE
from tests.engine.tiny_models import save_tiny
from tests.path.cores import GATEWAY, Cores
from tests.path.test_path_device_reuse import evict, second_digests, with_tiers
from tests.path.test_path_migration import PROMPTS, Movers
from tests.waiting import until
from worker.core.kv_tiers import KVTiers
from worker.messages import CoreFrame, Work

pytestmark = pytest.mark.slow

PROMPT = [2 + i % 60 for i in range(300)]
GREEDY = SamplingParams(max_tokens=8, seed=0, temperature=0.0, ignore_eos=True)
LINK_NBYTES_PER_S = 1e6
"""The rate of the network to decode: by far slower than what a tier in memory is thought to be."""
DEVICES = ["", "float32"]
"""A CPU's engine, and a GPU's on the reference kernels."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fusible")
    save_tiny(folder, "llama", **FUSIBLE)
    return str(folder)


class Clock:
    """A clock that stands until a test turns it: a load falls behind only then."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Pair:
    """A prefill and a decode worker over a slow network. Decode's memory tier has what it was sent, its cache not."""

    def __init__(self, cores: Cores, tiers: KVTiers, clock: Clock) -> None:
        self.cores, self.tiers, self.clock = cores, tiers, clock
        self.engine = cores.decode.engine
        self.expected = self.ask()
        until(lambda: tiers.is_idle)
        evict(self.engine)

    def ask(self) -> list[int]:
        (tokens,) = self.cores.answers([PROMPT], GREEDY)
        return tokens

    @property
    def num_blocks(self) -> int:
        """Return how many blocks may be loaded: all but that of the last token."""
        return (len(PROMPT) - 1) // self.engine.layout.block_size

    @property
    def num_sent(self) -> int:
        """Return how many blocks have come over the link."""
        (link,) = self.cores.decode.node.stats()
        return link.nbytes // self.engine.layout.block_nbytes

    @property
    def host(self) -> HostMemoryTier:
        host = self.tiers._loaders["host"].tier
        assert isinstance(host, HostMemoryTier)
        return host

    def loaded(self) -> float:
        return self.tiers.counters()["kv_handoff_loaded_blocks"]

    def assert_clean(self) -> None:
        until(lambda: self.tiers.is_idle)
        for worker in (self.cores.prefill, self.cores.decode):
            worker.engine.check()
            assert worker.engine.pool.num_held == 0


@contextmanager
def paced_pair(model: str, device: str = "", transfer: str = "tcp") -> Iterator[Pair]:
    with ExitStack() as stack:
        cores, clock = stack.enter_context(Cores(model, transfer, (device, device))), Clock()
        if transfer == "tcp":
            proxy = PacedProxy(cores.decode.node.address, LINK_NBYTES_PER_S)
            stack.callback(proxy.close)
            cores.decode.ref = msgspec.structs.replace(cores.decode.ref, transfer=proxy.address)
        tiers = with_tiers(cores.decode, clock)
        stack.callback(tiers.close)
        yield Pair(cores, tiers, clock)


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_tiers_of_decode_hold_is_loaded_there_and_only_the_rest_is_sent(model: str, device: str) -> None:
    with paced_pair(model, device) as pair:
        before = pair.num_sent
        assert pair.ask() == pair.expected
        assert pair.loaded() == pair.num_blocks
        assert pair.num_sent == before + pair.engine.layout.num_blocks(len(PROMPT)) - pair.num_blocks
        counts = pair.tiers.counters()
        assert (counts["kv_loaded_handoffs"], counts["kv_loaded_prompts"], counts["kv_missed_prompts"]) == (1, 0, 0)
        assert pair.ask() == pair.expected, "what was loaded is in the cache"
        assert pair.loaded() == pair.num_blocks
        pair.assert_clean()


def test_a_damaged_block_and_those_behind_it_are_sent(model: str) -> None:
    with paced_pair(model) as pair:
        slot, nbytes = pair.host._slots[pair.tiers._key(second_digests(pair.engine, PROMPT)[3])]
        pair.host._arena[slot * max_record_nbytes(pair.engine.layout) + nbytes - 5] ^= 1
        assert pair.ask() == pair.expected
        assert (pair.loaded(), pair.tiers.counters()["kv_host_refused_blocks"]) == (3, 1)
        pair.assert_clean()


def test_nothing_is_loaded_where_decode_fetches_by_nvlink(model: str) -> None:
    with paced_pair(model, "float32", "nvlink") as pair:
        assert pair.ask() == pair.expected
        assert (pair.loaded(), pair.tiers.counters()["kv_loads_given_up"]) == (0, 0)
        pair.assert_clean()


def test_a_load_slower_than_the_link_is_given_up_and_all_is_sent(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with paced_pair(model) as pair, hanging(pair.host, monkeypatch) as has_begun:
        before = pair.num_sent
        threading.Thread(target=late, args=[has_begun, pair.clock], daemon=True).start()
        assert pair.ask() == pair.expected
        assert pair.num_sent == before + pair.engine.layout.num_blocks(len(PROMPT))
        assert (pair.loaded(), pair.tiers.counters()["kv_loads_given_up"]) == (0, 1)
        pair.assert_clean()


def test_a_request_that_ends_while_its_blocks_are_loaded_leaves_nothing(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paced_pair(model) as pair, hanging(pair.host, monkeypatch) as has_begun:
        workers = pair.cores.prefill, pair.cores.decode
        job = pair.cores._job(PROMPT, GREEDY)
        for worker in workers:
            worker.front.inbox.append(Work([job], time.monotonic()))
        until(lambda: pair.cores._turn() is not None and has_begun.is_set())
        for worker in workers:
            worker.front.inbox.append(Work([Cancel(job.request_id, Epoch(1), "left")], time.monotonic()))
        until(lambda: pair.cores._turn() is not None and all(worker.is_idle() for worker in workers))
        assert pair.loaded() == 0
        pair.assert_clean()


def test_a_handoff_whose_prefill_is_lost_while_its_blocks_are_loaded_leaves_nothing(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paced_pair(model) as pair, hanging(pair.host, monkeypatch) as has_begun:
        prefill, decode = pair.cores.prefill, pair.cores.decode
        job = pair.cores._job(PROMPT, GREEDY)
        for worker in (prefill, decode):
            worker.front.inbox.append(Work([job], time.monotonic()))
        until(lambda: pair.cores._turn() is not None and has_begun.is_set())
        prefill.node.close()
        failed: list[Event] = []

        def has_failed() -> bool:
            decode.core.turn()
            frames = [message for message in decode.front.heard if isinstance(message, CoreFrame)]
            failed.extend(event for frame in frames for event in frame.events.get(GATEWAY, []))
            decode.front.heard.clear()
            return bool(failed) and decode.is_idle()

        until(has_failed)
        assert [event.code for event in failed if isinstance(event, Failed)] == [PeerLost.code]
        assert (pair.loaded(), decode.counters()["quarantined"], decode.engine.pool.num_held) == (0, 0, 0)
        decode.engine.check()


def test_what_the_tiers_of_a_destination_hold_of_an_answer_that_moves_is_loaded_there(tmp_path: Path) -> None:
    movers = Movers(str(tiny.save_tiny(tmp_path)), (WorkerRole.DECODE, WorkerRole.DECODE))
    a, b = movers.workers
    long = msgspec.structs.replace(GREEDY, max_tokens=300)
    with ExitStack() as stack:
        for worker in movers.workers:
            stack.callback(worker.node.close)
        proxy, tiers = PacedProxy(b.node.address, LINK_NBYTES_PER_S), with_tiers(b, Clock())
        stack.callback(proxy.close)
        stack.callback(tiers.close)
        b.ref = msgspec.structs.replace(b.ref, transfer=proxy.address)

        def moved(name: str, num_tokens: int) -> list[int]:
            movers.events.clear()
            job = movers.begin(name, a, long)
            movers.until(lambda: movers.has(name, num_tokens))
            movers.move(job, a, b)
            movers.until(lambda: movers.is_over(name))
            assert movers.of(Moved, name, 1)
            return [token.token_id for token in movers.tokens(name)]

        moved("drawn", 10)  # after which the rate of the link is known
        movers.begin("greedy", b, long)
        movers.until(lambda: movers.is_over("greedy"))
        expected = [token.token_id for token in movers.tokens("greedy")]
        until(lambda: tiers.is_idle)
        evict(b.engine)
        before = tiers.counters()["kv_handoff_loaded_blocks"]
        assert moved("greedy", 40) == expected
        counts = tiers.counters()
        num_known = (len(PROMPTS["greedy"]) + 40) // b.engine.layout.block_size
        assert before == 0 and counts["kv_handoff_loaded_blocks"] >= num_known - 1
        assert counts["kv_loaded_handoffs"] == 1
        movers.until(movers.is_clean)


@contextmanager
def hanging(host: HostMemoryTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let reads of a tier wait until the end; yields the sign that one does."""
    has_begun, is_over, load = threading.Event(), threading.Event(), host.load

    def waiting(*args: object) -> list[int]:
        has_begun.set()
        is_over.wait()
        return load(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(host, "load", waiting)
    try:
        yield has_begun
    finally:
        is_over.set()


def late(has_begun: threading.Event, clock: Callable[[], float]) -> None:
    """Turn the clock by more than any handoff takes, once a read hangs."""
    assert isinstance(clock, Clock)
    has_begun.wait()
    clock.now += 3600.0
