"""The two sides of a handoff, in one process: KV computed here, copied by numpy, continued there."""

# pyright: reportArgumentType=false
# Plain strings stand for request ids.

import struct
from dataclasses import replace

import numpy as np
import pytest

from contracts.errors import OutOfBlocks, RequestError
from contracts.events import Token
from engine.engine import Engine
from engine.loader import load_engine
from tests.engine.driving import drain, greedy, random_prompts, request, settings, tokens_of
from tests.engine.tiny_models import VOCAB

pytestmark = pytest.mark.slow

Pair = tuple[Engine, Engine]

PROMPTS = random_prompts(VOCAB, (5, 16, 61, 200))


@pytest.fixture
def pair(folder):
    chunked = settings(model=str(folder), max_batched_tokens=48)
    return load_engine(chunked), load_engine(settings(model=str(folder)))


def prefill(engine, name, prompt, sampling):
    engine.submit(request(name, prompt, sampling, handoff=True))
    outputs = drain(engine)
    return [c for o in outputs for c in o.chunks], [s.token for o in outputs for s in o.sampled]


def land(source, target, chunks, reservation):
    """Copies what the decode side does not have, as a transfer would: pages of all planes, chunk by chunk."""
    size = source.layout.block_size
    for chunk in chunks:
        first = max(chunk.first_token, reservation.skip_tokens)
        skipped = (first - chunk.first_token) // size
        pages = reservation.blocks[first // size : target.layout.num_blocks(chunk.first_token + chunk.num_tokens)]
        target.pool_bytes[:, pages] = source.pool_bytes[:, chunk.blocks[skipped:]]


def hand_over(source, target, name, prompt, sampling):
    chunks, first = prefill(source, name, prompt, sampling)
    reservation = target.reserve(request(name, prompt, sampling))
    land(source, target, chunks, reservation)
    target.adopt(name, first[0])
    target.incoming_writer_ended(name)
    source.release(name)
    return reservation, [first[0].token_id, *tokens_of(drain(target), name)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_handed_over_answer_is_that_of_one_engine(folder, pair: Pair, temperature):
    sampling = greedy(10, temperature=temperature, seed=3, frequency_penalty=0.5)
    alone = load_engine(settings(model=str(folder)))
    for index, prompt in enumerate(PROMPTS):
        alone.submit(request(str(index), prompt, sampling))
        expected = tokens_of(drain(alone), str(index))
        assert hand_over(*pair, str(index), prompt, sampling)[1] == expected
    assert all(engine.stats().num_held == 0 for engine in pair)


def test_chunks_cover_the_prompt_once_and_in_order(pair: Pair):
    engine = pair[0]
    for name in ("cold", "warm"):
        chunks, _ = prefill(engine, name, PROMPTS[3], greedy(5))
        starts = [chunk.first_token for chunk in chunks]
        assert starts == np.cumsum([0, *[chunk.num_tokens for chunk in chunks[:-1]]]).tolist()
        assert all(start % 16 == 0 for start in starts)
        assert sum(chunk.num_tokens for chunk in chunks) == 200
        assert all(len(chunk.blocks) == engine.layout.num_blocks(chunk.num_tokens) for chunk in chunks)
        engine.release(name)
    assert engine.stats().prefix_hit_tokens == 192


def test_the_decode_side_skips_what_it_has(pair: Pair):
    prompt = PROMPTS[2]
    first, answer = hand_over(*pair, "a", prompt, greedy(6))
    second, again = hand_over(*pair, "b", prompt, greedy(6))
    assert (first.skip_tokens, second.skip_tokens) == (0, 48)
    assert answer == again


def test_a_prompt_from_elsewhere_enters_the_prefix_cache_by_and_by_and_all_of_it_at_the_end(pair: Pair, monkeypatch):
    monkeypatch.setattr("engine.cache.prefix_insertion.MAX_LATE_BLOCKS", 2)
    source, target = pair
    chunks, first = prefill(source, "a", PROMPTS[3], greedy(4))
    land(source, target, chunks, target.reserve(request("a", PROMPTS[3], greedy(4))))
    target.adopt("a", first[0])
    target.incoming_writer_ended("a")
    found = []
    while target.has_work():
        target.step()
        found.append(target.stats().num_cached_blocks)
    assert found == [2, 4, 12]
    target.check()
    assert target.reserve(request("b", PROMPTS[3], greedy(4))).skip_tokens == 192


def test_a_prefix_is_shared_by_requests_of_one_salt_only(pair: Pair):
    hits = []
    for index, salt in enumerate(("", "a", "b", "a", "")):
        asked = replace(request(str(index), PROMPTS[2], greedy(2)), cache_salt=salt)
        before = pair[0].stats().prefix_hit_tokens
        pair[0].submit(replace(asked, handoff=True))
        first = next(sampled.token for output in drain(pair[0]) for sampled in output.sampled)
        reserved = pair[1].reserve(asked)
        pair[1].adopt(asked.request_id, first)
        pair[1].incoming_writer_ended(asked.request_id)
        drain(pair[1])
        hits.append((pair[0].stats().prefix_hit_tokens - before, reserved.skip_tokens))
        pair[0].release(asked.request_id)
    assert hits == [(0, 0), (0, 0), (0, 0), (48, 48), (48, 48)]


@pytest.mark.parametrize("is_attacked", [False, True])
def test_a_salt_with_the_bytes_of_a_block_gives_nobody_else_its_pages(pair: Pair, is_attacked):
    first, rest = list(range(100, 116)), PROMPTS[2]
    pair[0].submit(request("a", [*first, *rest], greedy(4)))
    expected = tokens_of(drain(pair[0]), "a")
    pair[1].submit(request("first", [*first, 5], greedy(1)))
    if is_attacked:
        salt = struct.pack("<16i", *first).decode()
        pair[1].submit(replace(request("salted", rest, greedy(1)), cache_salt=salt))
    drain(pair[1])
    pair[1].submit(request("a", [*first, *rest], greedy(4)))
    outputs = drain(pair[1])
    assert tokens_of(outputs, "a") == expected
    assert [start.cached_tokens for output in outputs for start in output.started] == [16]


def test_the_first_step_of_an_adopted_request_tells_that_it_started(pair: Pair):
    asked = request("a", PROMPTS[2], greedy(4))
    pair[1].reserve(asked)
    pair[1].adopt(asked.request_id, Token(0, 5))
    started = [[start.request_id for start in output.started] for output in drain(pair[1])]
    assert started == [["a"], [], []]


def test_only_what_is_reserved_is_adopted_and_that_once(pair: Pair):
    engine, first = pair[1], Token(0, 5)
    engine.submit(request("of here", PROMPTS[2], greedy(3)))
    engine.reserve(request("a", PROMPTS[2], greedy(3)))
    engine.adopt("a", first)
    for name in ("of here", "a"):
        with pytest.raises(KeyError):
            engine.adopt(name, first)


@pytest.mark.parametrize("token_id", [-1, 320, 2**31])
def test_a_token_0_that_no_such_model_draws_is_refused(pair: Pair, token_id: int):
    engine, asked = pair[1], request("a", PROMPTS[2], greedy(4))
    assert engine.checkpoint.config.vocab_size == 320
    engine.reserve(asked)
    with pytest.raises(RequestError, match=f"token 0 that came with the handoff is {token_id}, outside of 0 to 319"):
        engine.adopt(asked.request_id, Token(0, token_id))
    engine.release(asked.request_id)
    engine.incoming_writer_ended(asked.request_id)
    engine.check()


def test_pages_stay_taken_until_the_writer_has_ended(pair: Pair):
    engine = pair[1]
    free = engine.stats().free_tokens
    engine.reserve(request("a", PROMPTS[2], greedy()))
    engine.release("a")
    engine.release("a")
    assert engine.stats().free_tokens == free - 64
    engine.check()
    with pytest.raises(RequestError, match="is here already"):  # or the writer's hold would be forgotten
        engine.reserve(request("a", PROMPTS[0], greedy()))
    engine.incoming_writer_ended("a")
    engine.incoming_writer_ended("a")
    assert engine.stats().free_tokens == free
    engine.check()


def test_what_came_of_a_handoff_that_broke_off_is_found_once_its_writer_has_ended(pair: Pair):
    source, target = pair
    prompt, asked = PROMPTS[3], greedy(6)
    chunks, first = prefill(source, "a", prompt, asked)
    land(source, target, chunks[:2], target.reserve(request("a", prompt, asked)))
    target.release("a")
    assert target.stats().num_cached_blocks == 0  # a writer might still write there
    assert target.incoming_writer_ended("a", 93) == 80  # of 96 that came 93 are said to be checked: five whole blocks
    assert target.incoming_writer_ended("a", 93) == 0
    target.check()
    assert target.stats().num_held == 0 and target.stats().num_cached_blocks == 5
    rest = target.reserve(request("b", prompt, asked))
    assert rest.skip_tokens == 80
    land(source, target, chunks[1:], rest)
    target.adopt("b", first[0])
    target.incoming_writer_ended("b")
    source.release("a")
    alone = pair[0]
    alone.submit(request("c", prompt, asked))
    assert [first[0].token_id, *tokens_of(drain(target), "b")] == tokens_of(drain(alone), "c")


def test_what_came_for_one_salt_is_not_found_by_another(pair: Pair):
    target = pair[1]
    asked = replace(request("a", PROMPTS[3], greedy()), cache_salt="one")
    target.reserve(asked)
    target.release("a")
    assert target.incoming_writer_ended("a", 200) == 192
    assert target.reserve(request("b", PROMPTS[3], greedy())).skip_tokens == 0
    assert target.reserve(replace(asked, request_id="c")).skip_tokens == 192


def test_generations_tell_a_page_of_now_from_one_of_then(pair: Pair):
    engine = pair[1]
    first = engine.reserve(request("a", PROMPTS[0], greedy()))
    engine.release("a")
    engine.incoming_writer_ended("a")
    second = engine.reserve(request("b", PROMPTS[0], greedy()))
    assert second.blocks == first.blocks and second.generations != first.generations


def test_a_held_sequence_can_go_on_where_it_is(folder, pair: Pair):
    alone = load_engine(settings(model=str(folder)))
    alone.submit(request("a", PROMPTS[2], greedy(10)))
    expected = tokens_of(drain(alone), "a")
    prefill(pair[0], "a", PROMPTS[2], greedy(10))
    assert pair[0].stats().num_held == 1 and not pair[0].has_work()
    pair[0].keep_local("a")
    assert tokens_of(drain(pair[0]), "a") == expected[1:]
    assert pair[0].stats().num_held == 0


def test_a_handoff_that_ends_at_token_0_is_held_for_its_readers(pair: Pair):
    engine = pair[0]
    engine.submit(request("a", PROMPTS[0], greedy(1), handoff=True))
    outputs = drain(engine)
    assert [e.num_tokens for o in outputs for e in o.ended] == [1]
    assert engine.stats().num_held == 1
    engine.release("a")
    assert engine.stats().num_held == 0


def test_a_handoff_that_ended_at_token_0_does_not_go_on_here(pair: Pair):
    engine = pair[0]
    prefill(engine, "a", PROMPTS[0], greedy(1))
    engine.keep_local("a")
    assert not engine.has_work() and engine.stats().num_held == 0
    engine.check()


def test_reservations_are_bounded_by_slots_and_blocks(folder):
    few = load_engine(settings(model=str(folder), max_num_seqs=1))
    few.reserve(request("a", PROMPTS[0], greedy()))
    with pytest.raises(OutOfBlocks, match="all 1 sequence slots"):
        few.reserve(request("b", PROMPTS[0], greedy()))
    small = load_engine(settings(model=str(folder), kv_cache_nbytes=14 * few.layout.block_nbytes))
    small.reserve(request("a", PROMPTS[3], greedy()))
    for _ in range(2):
        with pytest.raises(OutOfBlocks, match="4 KV blocks wanted, 1 of 14 available"):
            small.reserve(request("b", PROMPTS[2], greedy()))
    small.check()


def test_what_found_no_pages_looks_again_when_there_may_be_more(folder, monkeypatch):
    engine = load_engine(
        settings(model=str(folder), kv_cache_nbytes=14 * load_engine(settings(model=str(folder))).layout.block_nbytes)
    )
    looked, find = [], engine.pool.find
    monkeypatch.setattr(engine.pool, "find", lambda *asked: looked.append(1) or find(*asked))
    engine.reserve(request("a", PROMPTS[3], greedy()))
    looked.clear()

    def is_refused() -> bool:
        try:
            engine.reserve(request("b", PROMPTS[2], greedy()))
        except OutOfBlocks:
            return True
        return False

    assert is_refused() and is_refused() and len(looked) == 1
    engine.release("a")
    assert is_refused() and len(looked) == 1, "the pages are the writer's still"
    engine.incoming_writer_ended("a")
    assert not is_refused() and len(looked) == 2
    engine.check()


def test_a_preempted_request_has_its_pages_before_a_newcomer(folder):
    block_nbytes = load_engine(settings(model=str(folder))).layout.block_nbytes
    engine = load_engine(settings(model=str(folder), kv_cache_nbytes=14 * block_nbytes, prefix_cache=False))
    for name, prompt in zip("ab", random_prompts(VOCAB, (80, 80), seed=1), strict=True):
        engine.submit(request(name, prompt, greedy(60)))
    while not engine.stats().num_preemptions:
        engine.step()
    assert engine.stats().free_tokens >= 16
    with pytest.raises(OutOfBlocks, match="preempted"):
        engine.reserve(request("new", PROMPTS[0], greedy()))
    drain(engine)
    engine.reserve(request("new", PROMPTS[0], greedy()))


def small(folder, num_blocks: int = 10) -> Engine:
    block_nbytes = load_engine(settings(model=str(folder))).layout.block_nbytes
    return load_engine(settings(model=str(folder), kv_cache_nbytes=num_blocks * block_nbytes, prefix_cache=False))


def steps_until(engine: Engine, name: str, between) -> int:
    for number in range(100):
        between(number)
        output = engine.step()
        engine.check()
        if name in [start.request_id for start in output.started]:
            return number
    raise AssertionError(f"{name} never started")


@pytest.mark.parametrize("priority", [0, -1, 1])
@pytest.mark.parametrize("lacks", ["slots", "pages"])
def test_a_prompt_has_its_turn_before_handoffs_that_are_offered_later(folder, lacks, priority):
    """They are handed in as fast as answers end, before the next step may begin with the prompt."""
    engine = small(folder) if lacks == "pages" else load_engine(settings(model=str(folder), max_num_seqs=2))
    prompts, numbers = random_prompts(VOCAB, [40] * 100), iter(range(100))

    def hand_in() -> None:
        while True:
            name = str(number := next(numbers))
            try:
                engine.reserve(request(name, prompts[number], greedy(4 + number % 7)))
            except OutOfBlocks:
                return
            engine.adopt(name, Token(0, 5))
            engine.incoming_writer_ended(name)

    hand_in()
    engine.submit(replace(request("local", prompts[0], greedy(3)), priority=priority))
    if priority <= 0:
        assert steps_until(engine, "local", lambda _: hand_in()) < 12
    else:
        with pytest.raises(StopIteration):  # those that are more urgent may keep it waiting
            steps_until(engine, "local", lambda _: hand_in())


def test_a_handoff_has_its_turn_before_prompts_that_come_later(folder):
    """It is longer than they are, so each time they would find room and it would not."""
    engine, arrivals = small(folder), []

    def come_in(number: int) -> None:
        engine.submit(request(str(number), PROMPTS[1], greedy(9)))
        if number == 3:
            arrivals.append(engine.arrive(request("long", PROMPTS[2] * 2, greedy(3))))
        if arrivals and not engine.has_reserved:
            try:
                engine.reserve(request("long", PROMPTS[2] * 2, greedy(3)), arrivals[0])
            except OutOfBlocks:
                return
            engine.adopt("long", Token(0, 5))
            engine.incoming_writer_ended("long")

    assert steps_until(engine, "long", come_in) < 12


def test_nothing_is_left_to_a_handoff_that_is_given_up(folder):
    engine = small(folder, 8)
    engine.submit(request("runs", PROMPTS[1], greedy(40)))
    engine.step()
    with pytest.raises(OutOfBlocks):
        engine.reserve(request("long", PROMPTS[2] * 2, greedy(3)))
    engine.submit(request("later", PROMPTS[2], greedy(3)))
    engine.step()
    assert engine.stats().num_waiting == 1
    engine.release("long")
    engine.step()
    assert engine.stats().num_waiting == 0


def test_an_offer_waits_for_preempted_prompts_that_come_before_it(folder):
    """Not for others: one that was preempted may stay behind whoever comes, as long as more urgent ones do."""
    engine = small(folder)
    early = engine.arrive(request("offer", PROMPTS[0], greedy(2)))
    for name in ("a", "b"):
        engine.submit(replace(request(name, PROMPTS[2], greedy(80)), priority=1))
    while engine.stats().num_preemptions == 0:
        engine.step()
    offer = request("offer", PROMPTS[0], greedy(2))
    for later in (replace(offer, priority=2), replace(offer, priority=1)):
        with pytest.raises(OutOfBlocks, match="preempted requests come first"):
            engine.reserve(later)
    assert engine.reserve(replace(offer, priority=1), early).blocks
    assert engine.sequences[offer.request_id].urgency == (1, early)


@pytest.mark.parametrize("is_offer_first", [False, True])
def test_an_idle_engine_leaves_no_room_to_who_can_not_begin(folder, is_offer_first):
    """Pages are held until somebody else takes them over. Two workers that wait so for each other would stand still."""
    engine = small(folder)
    engine.submit(request("held", random_prompts(VOCAB, [70])[0], greedy(4), handoff=True))
    engine.step()
    (large,) = random_prompts(VOCAB, [100])
    if is_offer_first:
        with pytest.raises(OutOfBlocks):
            engine.reserve(request("large", large, greedy(4)))
        engine.submit(request("small", PROMPTS[0], greedy(4)))
        assert any(output.sampled for output in (engine.step(), engine.step()))
    else:
        engine.submit(request("large", large, greedy(4)))
        engine.step()
        assert engine.reserve(request("small", PROMPTS[0], greedy(4))).blocks


def test_a_prompt_from_elsewhere_that_is_preempted_at_once_is_found_again(folder):
    """All its full blocks: prefill has computed them, decode need not."""
    block_nbytes = load_engine(settings(model=str(folder))).layout.block_nbytes
    engine = load_engine(settings(model=str(folder), kv_cache_nbytes=12 * block_nbytes))
    older, landed = random_prompts(VOCAB, (95, 95))
    engine.submit(request("older", older, greedy(18)))
    engine.step()
    engine.step()
    engine.reserve(request("landed", landed, greedy(4)))
    engine.incoming_writer_ended("landed")
    engine.adopt("landed", Token(0, 5))
    outputs = drain(engine)
    assert engine.stats().num_preemptions == 1
    assert [start.cached_tokens for output in outputs for start in output.started] == [80]


def test_release_in_every_state_leaves_nothing_behind(pair: Pair):
    engine = pair[0]
    engine.submit(request("waiting", PROMPTS[0], greedy()))
    engine.release("waiting")
    engine.submit(request("running", PROMPTS[3], greedy()))
    engine.step()
    engine.release("running")
    prefill(engine, "held", PROMPTS[2], greedy())
    engine.release("held")
    engine.release("never seen")
    assert not engine.has_work()
    engine.check()
    assert engine.stats().free_tokens == engine.capacity_tokens
