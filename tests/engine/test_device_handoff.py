"""Two engines of the GPU's adapter: pages pulled out of one pool into the other, and blocks that a batch still
writes.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
# Plain strings stand for request ids.

import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from contracts.errors import ConfigError, OutOfBlocks, TransferError
from contracts.layout import KVLayout
from engine.cuda import runner
from engine.cuda.kv.deferred_copies import CopyStreams, StreamDeferredCopy
from engine.cuda.kv.kv_cache import DeviceCache, whole_blocks
from engine.cuda.kv.page_checksums import DeviceChecksums
from engine.cuda.kv.peer_pool import PeerPool
from engine.cuda.kv.staging import recordable
from engine.cuda.kv.transfer_pool import DeviceTransferPool
from engine.cuda.loader import DeviceBackendBuilder
from engine.cuda.runtime.shared_memory import HostMapping, attach
from engine.engine import Engine
from engine.messages import ChunkScheduled, StepObserver
from engine.model_loader.tensor_parallel_shards import Shard
from kernels import catalog
from kernels.caps import Caps
from kernels.reference.move import STRIDE
from kernels.reference.quant import to_e4m3
from kernels.specs import MoveSpec
from tests.engine.device_engines import adopted, device_engine, hand_over, landed, prefilled
from tests.engine.driving import drain, greedy, random_prompts, request, tokens_of
from tests.engine.tiny_models import VOCAB

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(VOCAB, (5, 64, 130, 200))


def test_a_handed_over_answer_is_that_of_one_engine(folder):
    alone, source, target = (device_engine(folder, max_batched_tokens=128) for _ in range(3))
    for index, prompt in enumerate([*PROMPTS, PROMPTS[3]]):
        alone.submit(request(str(index), prompt, greedy(8)))
        assert hand_over(source, target, str(index), prompt) == tokens_of(drain(alone), str(index))
    for engine in (source, target):
        engine.check()
        assert engine.stats().free_tokens == engine.capacity_tokens


@pytest.fixture
def handing(folder):
    """What `prefilled` and `landed` take, by name: a source, a target of six blocks, the way between them."""
    source = device_engine(folder, max_batched_tokens=128)
    size = source.layout.block_nbytes
    target = device_engine(folder, max_batched_tokens=128, prefix_cache=False, kv_cache_nbytes=6 * size)
    remote = target.transfer_pool.attach(source.transfer_pool.share())

    def lands(name, prompt, sampling):
        told = prefilled(source, name, prompt, 1, sampling)
        source.release(name)  # nothing is computed there before its pages are pulled
        landed(target, remote, told, name, prompt, sampling)
        return told

    yield target, lands
    remote.close()
    drain(target)
    assert target.stats().free_tokens == target.capacity_tokens


def given_up(target, name):
    target.release(name)
    target.incoming_writer_ended(name)


def expected_of(folder, prompt, sampling):
    alone = device_engine(folder, max_batched_tokens=128)
    alone.submit(request("alone", prompt, sampling))
    return tokens_of(drain(alone), "alone")


@pytest.mark.parametrize("length", [5, 63, 64, 127, 128, 130])
def test_a_prepared_first_step_lacks_only_its_token(folder, handing, length, monkeypatch):
    target, lands = handing
    (prompt,) = random_prompts(VOCAB, (length,), seed=length)
    told = lands("a", prompt, greedy(8))
    worked_out = []
    for name in ("decode_rows", "decode_tables"):
        monkeypatch.setattr(runner, name, lambda *args, name=name: worked_out.append(name))
    adopted(target, told, "a")
    flight = target.pipeline.launch(StepObserver())
    assert worked_out == []
    monkeypatch.undo()
    target.pipeline.in_flight = flight
    outputs = drain(target)
    assert [told.first.token_id, *tokens_of(outputs, "a")] == expected_of(folder, prompt, greedy(8))


def test_a_first_step_that_can_not_be_prepared_is_worked_out_when_it_is_due(folder, handing, monkeypatch):
    target, lands = handing
    state = target.runner.launcher.state

    def refuse(words):
        raise RuntimeError("no page-locked memory")

    monkeypatch.setattr(state, "put", refuse)
    monkeypatch.setattr(state, "staged", refuse)
    told = lands("a", PROMPTS[2], greedy(8))
    monkeypatch.undo()
    adopted(target, told, "a")
    assert [told.first.token_id, *tokens_of(drain(target), "a")] == expected_of(folder, PROMPTS[2], greedy(8))


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 1.0, "top_p": 0.9}, {"frequency_penalty": 1.5}, {"ignore_eos": False, "min_tokens": 6}],
    ids=["random", "penalties", "min_tokens"],
)
def test_a_prepared_step_draws_as_any_other(folder, handing, changes):
    target, lands = handing
    sampling = greedy(8, **changes)
    told = lands("a", PROMPTS[2], sampling)
    adopted(target, told, "a")
    assert [told.first.token_id, *tokens_of(drain(target), "a")] == expected_of(folder, PROMPTS[2], sampling)


@pytest.mark.parametrize("second", ["a", "b"], ids=["the same id", "another id"])
def test_what_was_prepared_for_one_that_was_given_up_is_nobodys(folder, handing, second):
    target, lands = handing
    lands("a", PROMPTS[1], greedy(8))
    given_up(target, "a")
    told = lands(second, PROMPTS[2], greedy(8))
    adopted(target, told, second)
    assert [told.first.token_id, *tokens_of(drain(target), second)] == expected_of(folder, PROMPTS[2], greedy(8))


def test_one_that_was_given_up_leaves_the_others_first_step_right(folder, handing):
    """Which was not prepared: two were reserved."""
    target, lands = handing
    lands("a", PROMPTS[1], greedy(8))
    told = lands("b", PROMPTS[2], greedy(8))
    given_up(target, "a")
    adopted(target, told, "b")
    assert [told.first.token_id, *tokens_of(drain(target), "b")] == expected_of(folder, PROMPTS[2], greedy(8))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_of_several_on_their_way_any_may_come_first(folder, handing, order):
    target, lands = handing
    prompts = dict(zip("ab", PROMPTS[1:3], strict=True))
    told = {name: lands(name, prompt, greedy(8)) for name, prompt in prompts.items()}
    outputs = []
    for name in order:
        adopted(target, told[name], name)
        outputs.append(target.step())
    outputs += drain(target)
    for name, prompt in prompts.items():
        assert [told[name].first.token_id, *tokens_of(outputs, name)] == expected_of(folder, prompt, greedy(8))


def test_others_may_decode_between_preparation_and_first_step(folder, handing):
    target, lands = handing
    told = lands("a", PROMPTS[1], greedy(8))
    target.submit(request("b", PROMPTS[0], greedy(20)))
    outputs = [target.step() for _ in range(4)]
    adopted(target, told, "a")
    outputs += drain(target)
    assert [told.first.token_id, *tokens_of(outputs, "a")] == expected_of(folder, PROMPTS[1], greedy(8))
    assert tokens_of(outputs, "b") == expected_of(folder, PROMPTS[0], greedy(20))


def test_one_that_is_preempted_before_its_prepared_step_is_computed_anew(folder, handing):
    target, lands = handing
    (ours, others), outputs = random_prompts(VOCAB, (128, 130), seed=1), []
    told = lands("a", ours, greedy(8))
    target.submit(request("b", others, greedy(80)))
    while sum(told.request_id == "b" for output in outputs for told in output.sampled) < 63:
        outputs.append(target.step())
    assert target.stats().free_tokens == 0  # and `b` fills its blocks
    adopted(target, told, "a")
    outputs += drain(target)
    assert target.stats().num_preemptions == 1
    assert [told.first.token_id, *tokens_of(outputs, "a")] == expected_of(folder, ours, greedy(8))
    assert tokens_of(outputs, "b") == expected_of(folder, others, greedy(80))


def test_a_changed_byte_changes_the_checksum_of_its_page_alone(folder):
    engine = device_engine(folder)
    pages, blocks = engine.transfer_pool, [3, 0, 5]
    before = pages.checksums(blocks).wait()
    pages.memory.tensor.view(pages.num_planes, pages.num_blocks + 1, -1).numpy()[1, 5, 7] += 1
    after = pages.checksums(blocks).wait()
    assert np.argwhere(before != after).tolist() == [[2, 1]]
    assert np.array_equal(pages.checksums([5]).wait()[0], after[2])


def test_staged_pages_are_those_of_the_pool(folder):
    pages = device_engine(folder).transfer_pool
    rows = np.array([0, pages.num_blocks + 2, 2 * pages.num_blocks - 1])
    data = np.random.default_rng(0).integers(0, 256, (3, pages.page_nbytes), dtype=np.uint8)
    pages.scatter(rows, data)
    out = np.empty_like(data)
    pages.gather(rows, out)
    assert np.array_equal(out, data)
    planes = pages.memory.tensor.view(pages.num_planes, pages.num_blocks + 1, -1).numpy()
    assert np.array_equal(planes[1, 2], data[1]) and np.array_equal(planes[1, pages.num_blocks - 1], data[2])


@pytest.mark.parametrize("shared", [b"", b"noise"])
def test_a_pool_that_says_nothing_of_use_is_refused(folder, shared):
    with pytest.raises(TransferError):
        device_engine(folder).transfer_pool.attach(shared)


def test_a_pool_of_another_shape_is_refused(folder):
    engine, other = device_engine(folder), device_engine(folder, block_size=128)
    with pytest.raises(TransferError, match="the peer's pages are"):
        engine.transfer_pool.attach(other.transfer_pool.share())


def test_blocks_of_a_batch_in_flight_are_given_to_nobody(folder):
    """A transfer writes on no stream of the engine's: the batch could write its token after the page has landed."""
    engine = device_engine(folder, prefix_cache=False)
    engine.submit(request("ends", PROMPTS[3], greedy(50)))
    for _ in range(4):
        engine.step()
    assert engine.has_work() and engine.stats().num_running == 1
    engine.release("ends")
    held = engine.capacity_tokens - engine.stats().free_tokens
    assert held >= 200
    engine.check()
    whole = [1] * (engine.max_model_len - 1)
    if len(whole) > engine.stats().free_tokens:
        with pytest.raises(OutOfBlocks):
            engine.reserve(request("lands", whole, greedy(1)))
    drain(engine)
    assert engine.stats().free_tokens == engine.capacity_tokens
    engine.check()


def test_a_mark_that_was_set_in_the_peers_place_is_not_waited_for(folder):
    """It tells nothing of what the peer has computed: what comes under it later is pulled when it is told of."""
    source, target = (device_engine(folder).transfer_pool for _ in range(2))
    mark = source.mark()
    remote = target.attach(source.share(), mark.shared)
    assert remote.pull_later([1], [2], True, 1, 4) is not None
    remote._last_mark = 4
    remote.expire()
    assert remote.pull_later([1], [2], True, 1, 4) is None
    assert remote.pull_later([1], [2], True, 1, 6) is not None
    remote.close()
    source.close()


def test_what_was_computed_before_what_is_waited_for_does_not_come_behind_it(folder):
    """Its grant came late. On one stream it would be copied after the later batch, or never."""
    source, target = (device_engine(folder).transfer_pool for _ in range(2))
    remote = target.attach(source.share(), source.mark().shared)
    assert remote.pull_later([1], [2], True, 1, 6) is not None
    assert remote.pull_later([2], [3], True, 1, 4) is None
    assert remote.pull_later([3], [4], True, 1, 6) is not None
    remote.close()
    source.close()


def test_memory_of_checksums_is_given_back_by_those_that_nobody_reads_too(folder):
    source, target = (device_engine(folder).transfer_pool for _ in range(2))
    remote, returned = target.attach(source.share(), source.mark().shared), []
    early = SimpleNamespace(value=9)
    taken = [remote._checksums(2) for _ in range(6)]
    assert remote._ready == []
    for sums in taken:
        done = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
        pull = StreamDeferredCopy(
            early, 8, [done, done], sums, lambda each: (returned.append(each), remote._is_read(each))
        )
        pull.drop() if len(returned) % 2 else pull.wait()
        pull.drop()
    assert returned == taken == remote._ready
    remote.close()
    source.close()


def test_memory_of_a_large_chunks_checksums_is_kept_for_the_next(folder):
    """Given back, it would wait for what waits for the next chunk's mark: of steps of more than 8192 tokens each."""
    source, target = (device_engine(folder).transfer_pool for _ in range(2))
    remote = target.attach(source.share(), source.mark().shared)
    large = remote._checksums(200)
    remote._is_read(large)
    small = remote._checksums(2)
    assert small is not large and remote._checksums(256) is large
    assert remote._checksums(257).max_pages == 512
    remote.close()
    source.close()


class Stream:
    """A stream of no device."""

    def __init__(self, *args, **options) -> None:
        self.is_idle = True

    def query(self) -> bool:
        return self.is_idle


class Remote:
    is_waiting = False


def test_no_lane_is_taken_from_one_who_launches_or_waits(monkeypatch):
    monkeypatch.setattr("engine.cuda.kv.deferred_copies._NUM_LANES", 1)
    monkeypatch.setattr("torch.cuda.Stream", Stream)
    lanes, one, two = CopyStreams(None), Remote(), Remote()
    taken: list[Stream | None] = []

    def take() -> None:
        with lanes.lent(two) as lane:
            taken.append(lane)

    other = threading.Thread(target=take)
    with lanes.lent(one) as lane:
        other.start()
        other.join(0.2)
        assert taken == [], "looked at while something is launched that does not wait yet"
        lane.is_idle, one.is_waiting = False, True  # type: ignore[union-attr]
    other.join()
    assert taken == [None]
    assert not lanes.give_back(one)
    lane.is_idle, one.is_waiting = True, False  # type: ignore[union-attr]
    take()
    assert taken == [None, lane]


@pytest.mark.parametrize(
    ("wanted", "page_nbytes", "got"),
    [(100, 65536, 100), (2048, 65536, 2047), (8192, 65536, 8191), (1 << 20, 65536, 32735)],
)
def test_planes_end_with_a_page_of_the_devices_memory(wanted, page_nbytes, got):
    assert whole_blocks(wanted, page_nbytes) == got
    assert (got + 1) * page_nbytes < 1 << 31


class Noting(StepObserver):
    """What is said of a batch, in order, and how many of its planes are there by then."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.said = engine, []

    def chunk_scheduled(self, chunk: ChunkScheduled) -> None:
        self.said.append(chunk)

    def chunks_launched(self, is_all: bool) -> None:
        pages = self.engine.transfer_pool
        planes = pages.memory.tensor.view(pages.num_planes, pages.num_blocks + 1, -1)
        self.said.append((is_all, int((planes[:, :-1] != 0).any(-1).any(-1).sum())))


def test_what_is_coming_is_what_is_done_and_its_early_planes_come_before(folder):
    engine = device_engine(folder, max_batched_tokens=128)
    engine.submit(request("a", PROMPTS[3], greedy(2), handoff=True))
    engine.submit(request("b", PROMPTS[0], greedy(2)))
    watcher, chunks, drawer = Noting(engine), [], engine.runner.launcher._sampling_kernel
    draw = drawer.into

    def noting(*inputs) -> None:
        watcher.said.append("drawn")
        draw(*inputs)

    drawer.into = noting
    while engine.has_work():
        chunks += engine.step(watcher).chunks
    coming = [said for said in watcher.said if isinstance(said, ChunkScheduled)]
    assert [(c.request_id, c.first_token, c.num_tokens, c.blocks) for c in coming] == [
        (c.request_id, c.first_token, c.num_tokens, c.blocks) for c in chunks
    ]
    early, planes = coming[0].early_planes, engine.layout.only_group.num_planes
    assert 0 < early < planes
    assert watcher.said[1:3] == [(False, early), (True, planes)]
    last = max(index for index, said in enumerate(watcher.said) if said in coming)
    assert watcher.said[last + 1 : last + 4] == [(False, planes), (True, planes), "drawn"], "before the token"


LAYOUT = KVLayout.uniform(model="m", num_layers=2, num_kv_heads=4, head_dim=8, block_size=4, dtype="bfloat16")
NARROW = LAYOUT.with_groups(dtype="float8_e4m3fn")
NUM_BLOCKS, SIZES = 40, [(1, 1), (1, 2), (2, 1), (4, 2), (2, 2)]


class Again:
    """A recording of no device: what was launched is launched once more."""

    def __init__(self, launch, stream) -> None:
        self._launch = launch

    @torch.inference_mode()
    def launch(self, stream) -> None:
        self._launch()


def group(layout: KVLayout, size: int, num_copies: int = 1) -> DeviceCache:
    """The cache of the first worker of a group, filled; those of the others live as long as it does. Copies of a shard
    are filled otherwise.
    """
    registry, layout = catalog.registry(Caps("cpu")), msgspec.structs.replace(layout, tp_size=size)
    dtype = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}[layout.only_group.dtype]
    caches = [DeviceCache(layout, NUM_BLOCKS, dtype, torch.device("cpu")) for _ in range(size * num_copies)]
    for cache in caches:
        cache._memory.tensor.view(torch.bfloat16).normal_()
    caches[0].share(registry, [cache.export() for cache in caches[1:]])
    caches[0].others = caches  # type: ignore[attr-defined]
    return caches[0]


def whole(cache: DeviceCache) -> torch.Tensor:
    return copies_of(cache)[0]


def copies_of(cache: DeviceCache) -> list[torch.Tensor]:
    return [torch.cat(shards, dim=2) for shards in cache.transfer_pool.copies]


@pytest.fixture
def recorded(monkeypatch):
    """Pools whose launches are recorded and see the host's words as they are then, as on a GPU."""
    monkeypatch.setattr("engine.cuda.kv.staging.Recording", Again)
    monkeypatch.setattr(
        DeviceChecksums, "_memory", lambda _, count, device: [torch.zeros(count, dtype=torch.int32)] * 2
    )

    def record(pool: DeviceTransferPool, num_parts: int) -> None:
        for count in (pool.num_shards, num_parts):
            pool.cut_into(count).packer._recorded_whats = ("pack", "unpack and sum", "narrow")

    return record


@pytest.mark.parametrize("num_copies", [1, 2])
@pytest.mark.parametrize("sizes", SIZES)
def test_what_is_packed_by_one_group_is_unpacked_by_another(sizes, num_copies, recorded):
    """Three times, of which the first one records."""
    source, target = (group(LAYOUT, size, num_copies) for size in sizes)
    ours, theirs, num_parts = source.transfer_pool, target.transfer_pool, max(sizes)
    for pool in (ours, theirs):
        pool.agreed(num_parts, sends=True)
        recorded(pool, num_parts)
    packed, came = (pool.allocate(20 * LAYOUT.block_nbytes) for pool in (ours, theirs))
    for count in (3, 8, 20):
        pages = np.arange(count, dtype=np.int32) * 2
        sums = ours.in_parts(ours.checksums(pages.tolist()).wait(), pages.tolist(), num_parts)
        ours.pack(pages, packed, num_parts)
        came.tensor.copy_(packed.tensor)
        assert np.array_equal(theirs.unpack(came, pages + 1, True, num_parts).wait(), sums)
        assert all(torch.equal(copy[:, pages + 1], whole(source)[:, pages]) for copy in copies_of(target))


@pytest.mark.parametrize("num_copies", [1, 2])
@pytest.mark.parametrize("sizes", SIZES)
def test_what_is_rounded_by_one_group_is_unpacked_by_another(sizes, num_copies, recorded):
    source, target = group(LAYOUT, sizes[0], num_copies), group(NARROW, sizes[1], num_copies)
    ours, theirs, num_parts = source.transfer_pool, target.transfer_pool, max(sizes)
    recorded(ours, num_parts)
    recorded(theirs, num_parts)
    scales = [0.5 + plane for plane in range(LAYOUT.only_group.num_planes)]
    narrowing, (packed, came) = (
        ours.narrowing(scales),
        (pool.allocate(20 * NARROW.block_nbytes) for pool in (ours, theirs)),
    )
    for count in (3, 8, 20):
        pages = np.arange(count, dtype=np.int32)
        sums = ours.narrow(pages, packed, narrowing, num_parts)
        came.tensor.copy_(packed.tensor)
        assert np.array_equal(theirs.unpack(came, pages + 1, True, num_parts).wait(), sums)
        inverse = (1.0 / torch.tensor(scales))[:, None, None]
        expected = to_e4m3(whole(source).view(torch.bfloat16)[:, pages].float() * inverse)
        assert all(torch.equal(copy[:, pages + 1], expected.view(torch.uint8)) for copy in copies_of(target))


def test_a_handed_over_answer_is_the_same_by_way_of_a_group(folder):
    """One engine to a group of two, and what has come there to another engine, which goes on."""
    alone, source, target = (device_engine(folder, max_batched_tokens=128) for _ in range(3))
    layout = msgspec.structs.replace(source.layout, tp_size=2)
    caches = [DeviceCache(layout, NUM_BLOCKS, torch.float32, torch.device("cpu")) for _ in range(2)]
    caches[0].share(catalog.registry(Caps("cpu")), [caches[1].export()])
    between = caches[0].transfer_pool
    alone.submit(request("a", PROMPTS[3], greedy(8)))
    source.submit(request("a", PROMPTS[3], greedy(8), handoff=True))
    outputs = drain(source)
    first = next(told.token for output in outputs for told in output.sampled)
    blocks = [block for output in outputs for chunk in output.chunks for block in chunk.blocks]
    into = target.reserve(request("a", PROMPTS[3], greedy(8))).blocks[: len(blocks)]
    remote = between.attach(source.transfer_pool.share())
    sums = remote.pull(blocks, range(len(blocks)), True)
    remote.close()
    remote = target.transfer_pool.attach(between.share())
    assert np.array_equal(remote.pull(range(len(blocks)), into, True), sums)
    assert remote.detail.startswith("pulled from 2 shards into 1")
    remote.close()
    target.adopt("a", first)
    target.incoming_writer_ended("a")
    assert [first.token_id, *tokens_of(drain(target), "a")] == tokens_of(drain(alone), "a")


@pytest.fixture
def mapped(monkeypatch):
    """How many of a host's memories are mapped."""
    open_now: list[HostMapping] = []
    opened, closed = HostMapping.__init__, HostMapping.close

    def opens(self, shared):
        opened(self, shared)
        open_now.append(self)

    def closes(self):
        closed(self)
        open_now.remove(self)

    monkeypatch.setattr(HostMapping, "__init__", opens)
    monkeypatch.setattr(HostMapping, "close", closes)
    return open_now


def test_what_was_mapped_is_not_after_it_turned_out_to_be_of_no_use(mapped, monkeypatch):
    source, target = group(LAYOUT, 2), group(LAYOUT, 1)
    before = len(mapped)

    def fails(self):
        assert len(mapped) == before + 2
        raise TransferError("no way between the two")

    monkeypatch.setattr(PeerPool, "_probe", fails)
    with pytest.raises(TransferError, match="no way"):
        target.transfer_pool.attach(source.transfer_pool.share())
    assert len(mapped) == before


def test_a_group_of_which_one_is_out_of_reach_is_refused_and_maps_nobody(mapped):
    layout = msgspec.structs.replace(LAYOUT.with_groups(num_kv_heads=6), tp_size=3)
    caches = [DeviceCache(layout, NUM_BLOCKS, torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    builder = DeviceBackendBuilder.__new__(DeviceBackendBuilder)
    builder._registry, told = catalog.registry(Caps("cpu")), [b"", caches[1].export(), b"/proc/self/fd/none"]
    builder._group = SimpleNamespace(shard=Shard(0, 3), exchange=lambda name, said: told)
    with pytest.raises(ConfigError, match="tensor_parallel is 3, and its GPUs can't reach each other's memory"):
        builder._share(caches[0])
    assert mapped == []


def test_a_copy_that_differs_makes_the_sum_of_its_part_wrong():
    """The sum is wrong for the page and plane that differ, whichever copy is the right one.

    The first copy is the one whose sum is sent.
    """
    cut, pages = group(LAYOUT, 2, 3).transfer_pool.cut_into(4), [3, 7]
    for others in cut.copies[1:]:
        for part, first in zip(others, cut.parts, strict=True):
            part.planes.copy_(first.planes)
    sent = cut.checksums_of(2)
    sent.launch(pages)
    expected = sent.wait()
    assert np.array_equal(cut.verifier.sums(pages), expected)
    for parts in cut.copies:
        byte = parts[2].planes[1, 7, parts[2].offset :]
        byte[0] ^= 1
        differs = cut.verifier.sums(pages) != expected
        assert differs.sum() == 1 and differs[1, 2 * LAYOUT.only_group.num_planes + 1]
        sent.launch(pages)
        assert np.array_equal(sent.wait(), expected) == (parts is not cut.parts)
        byte[0] ^= 1


def test_parts_of_sums_begin_where_a_kernel_expects_them():
    """Also of a model whose planes are no multiple of four: Triton would compile anew for a chunk of so many pages."""
    operations = [[lambda pages, sums, part=part: sums.fill_(part) for part in range(3)]]
    for count in (1, 2, 3):
        sums = DeviceChecksums(operations, 6, count, torch.device("cpu"))
        assert [each.data_ptr() % 16 for each in sums.sums] == [0, 0, 0]
        sums.launch(range(count))
        numbers = np.arange(6 * count, dtype=np.uint32).reshape(count, 6) * np.uint32(STRIDE)
        assert np.array_equal(sums.wait(), np.concatenate([numbers ^ np.uint32(part) for part in range(3)], axis=1))


@pytest.mark.parametrize(
    ("unit_nbytes", "narrows", "expected"),
    [
        (8192, False, ("pack", "unpack and sum")),
        (8192, True, ("pack", "unpack and sum", "narrow")),
        (12288, True, ("pack", "unpack and sum")),
        (6144, True, ()),
    ],
)
def test_only_kernels_of_ours_are_recorded(unit_nbytes, narrows, expected):
    registry = catalog.registry(Caps("cuda", 90, "NVIDIA H200", 132, triton=(3, 6, 0)))
    assert recordable(registry, MoveSpec(4, unit_nbytes), narrows) == expected


def test_planes_can_be_pulled_alone(folder):
    source, target = (device_engine(folder).transfer_pool for _ in range(2))
    source.memory.tensor.numpy().fill(7)
    mapping = attach(source.memory.share(), source.device)
    ours, theirs = (pool.cut_into(1).parts[0].grid for pool in (target, source))
    mapping.copy_pages(theirs, [3], target.memory.tensor, ours, [5], range(1, 3))
    planes = target.memory.tensor.view(target.num_planes, target.num_blocks + 1, -1)
    assert (planes[1:3, 5] == 7).all() and int((planes != 0).sum()) == 2 * target.page_nbytes
    mapping.close()
