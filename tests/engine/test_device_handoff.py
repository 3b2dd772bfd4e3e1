"""Two engines of the GPU's adapter: pages pulled out of one pool into the other, and blocks that a batch still
writes.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
# Plain strings stand for request ids.

import threading

import numpy as np
import pytest
from device_engines import device_engine
from driving import drain, greedy, random_prompts, request, tokens_of
from tiny_models import VOCAB, save_tiny

from contracts.errors import OutOfBlocks, TransferError
from engine.cuda.load import _whole
from engine.cuda.memory import attach
from engine.cuda.pages import Lanes
from engine.engine import Engine
from engine.messages import ChunkComing, Watcher

PROMPTS = random_prompts(VOCAB, (5, 64, 130, 200))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "llama")
    return path


def hand_over(source: Engine, target: Engine, name, prompt, num_tokens=8):
    source.submit(request(name, prompt, greedy(num_tokens), handoff=True))
    outputs = drain(source)
    first = next(told.token for output in outputs for told in output.sampled)
    reservation = target.reserve(request(name, prompt, greedy(num_tokens)))
    remote, size = target.transfer_pool.attach(source.transfer_pool.share()), target.layout.block_size
    for chunk in (chunk for output in outputs for chunk in output.chunks):
        start = max(chunk.first_token, reservation.skip_tokens)
        skipped, end = (start - chunk.first_token) // size, chunk.first_token + chunk.num_tokens
        into = reservation.blocks[start // size : target.layout.num_blocks(end)]
        if into:
            sums = remote.pull(chunk.blocks[skipped:], into, True)
            assert np.array_equal(sums, chunk.checksums.wait()[skipped:])
    remote.close()
    target.adopt(name, first)
    target.writer_ended(name)
    source.release(name)
    return [first.token_id, *tokens_of(drain(target), name)]


def test_a_handed_over_answer_is_that_of_one_engine(folder):
    alone, source, target = (device_engine(folder, max_batched_tokens=128) for _ in range(3))
    for index, prompt in enumerate([*PROMPTS, PROMPTS[3]]):
        alone.submit(request(str(index), prompt, greedy(8)))
        assert hand_over(source, target, str(index), prompt) == tokens_of(drain(alone), str(index))
    for engine in (source, target):
        engine.check()
        assert engine.stats().free_tokens == engine.capacity_tokens


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


def test_a_rehearsal_touches_what_belongs_to_nobody(folder):
    source, target = (device_engine(folder).transfer_pool for _ in range(2))
    remote, blocks = target.attach(source.share()), range(target.num_blocks)
    before = target.checksums(blocks).wait().copy()
    remote.rehearse()
    assert np.array_equal(target.checksums(blocks).wait(), before)
    remote.close()


def test_a_mark_that_was_set_in_the_peers_place_is_not_waited_for(folder):
    """It tells nothing of what the peer has computed: what comes under it later is pulled when it is told of."""
    source, target = (device_engine(folder).transfer_pool for _ in range(2))
    mark = source.mark()
    remote = target.attach(source.share(), mark.shared)
    assert remote.pull_later([1], [2], True, 1, 4) is not None
    remote._last_mark = 4
    remote.hurry()
    assert remote.pull_later([1], [2], True, 1, 4) is None
    assert remote.pull_later([1], [2], True, 1, 6) is not None
    remote.close()
    source.close()


class Stream:
    """Of no device."""

    def __init__(self, *args, **options) -> None:
        self.is_idle = True

    def query(self) -> bool:
        return self.is_idle


class Remote:
    is_waiting = False


def test_no_lane_is_taken_from_one_who_launches_or_waits(monkeypatch):
    monkeypatch.setattr("engine.cuda.pages._NUM_LANES", 1)
    monkeypatch.setattr("torch.cuda.Stream", Stream)
    lanes, one, two = Lanes(None), Remote(), Remote()
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
    assert _whole(wanted, page_nbytes) == got
    assert (got + 1) * page_nbytes < 1 << 31


class Noting(Watcher):
    """What is said of a batch, in order, and how many of its planes are there by then."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.said = engine, []

    def coming(self, chunk: ChunkComing) -> None:
        self.said.append(chunk)

    def launched(self, is_all: bool) -> None:
        pages = self.engine.transfer_pool
        planes = pages.memory.tensor.view(pages.num_planes, pages.num_blocks + 1, -1)
        self.said.append((is_all, int((planes[:, :-1] != 0).any(-1).any(-1).sum())))


def test_what_is_coming_is_what_is_done_and_its_early_planes_come_before(folder):
    engine = device_engine(folder, max_batched_tokens=128)
    engine.submit(request("a", PROMPTS[3], greedy(2), handoff=True))
    engine.submit(request("b", PROMPTS[0], greedy(2)))
    watcher, chunks = Noting(engine), []
    while engine.has_work():
        chunks += engine.step(watcher).chunks
    coming = [said for said in watcher.said if isinstance(said, ChunkComing)]
    assert [(c.request_id, c.first_token, c.num_tokens, c.blocks) for c in coming] == [
        (c.request_id, c.first_token, c.num_tokens, c.blocks) for c in chunks
    ]
    early, planes = coming[0].early_planes, engine.layout.num_planes
    assert 0 < early < planes
    assert watcher.said[1:3] == [(False, early), (True, planes)]


def test_planes_can_be_pulled_alone(folder):
    source, target = (device_engine(folder).transfer_pool for _ in range(2))
    source.memory.tensor.numpy().fill(7)
    mapping = attach(source.memory.share(), source.device)
    mapping.copy_pages(source.grid, [3], target.memory.tensor, target.grid, [5], range(1, 3))
    planes = target.memory.tensor.view(target.num_planes, target.num_blocks + 1, -1)
    assert (planes[1:3, 5] == 7).all() and int((planes != 0).sum()) == 2 * target.page_nbytes
    mapping.close()
