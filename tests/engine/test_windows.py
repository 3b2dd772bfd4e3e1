"""Windows and segments keep the pages of their latest tokens alone, and answers are those of transformers."""

# pyright: reportArgumentType=false
# Plain strings stand for request ids.

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.models.transformers_oracle import greedy as oracle_greedy
from contracts.errors import ConfigError, OutOfBlocks
from contracts.events import Token
from engine.cache.kv_groups import pages_of_sequence
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import ChunkDone, Reservation
from engine.page_lease import PageLease
from tests.engine.driving import answers, drain, greedy, random_prompts, request, settings, tokens_of
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

LENGTHS = (1, 5, 16, 17, 40, 150, 300)
SIZE, WINDOW = 16, 40
FEW = {"max_batched_tokens": 48, "max_mixed_tokens": 16, "max_num_seqs": 3}


@pytest.fixture(scope="module", params=["gpt_oss", "llama4"])
def windowed(request, tmp_path_factory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A tiny model's folder, prompts, and transformers' 12 greedy tokens after each."""
    folder = tmp_path_factory.mktemp("windows")
    model = save_tiny(folder, request.param)
    prompts = random_prompts(VOCAB, LENGTHS)
    return folder, prompts, [oracle_greedy(model, prompt, 12) for prompt in prompts]


def few(folder: Path, num_whole: int = 18, **changes) -> Engine:
    """An engine whose memory holds so many whole blocks, and so more blocks with fewer pages."""
    layout = load_engine(settings(model=str(folder))).layout
    engine = load_engine(settings(model=str(folder), kv_cache_nbytes=num_whole * layout.block_nbytes, **FEW | changes))
    assert not engine.groups.are_whole and engine.pool.num_blocks > num_whole
    return engine


def short_group(engine: Engine) -> int:
    return next(index for index, group in enumerate(engine.layout.groups) if group.is_short)


def page_table(engine: Engine):
    (table,) = (table for _, table in engine.groups._groups)
    return table


def test_answers_are_those_of_transformers(windowed):
    folder, prompts, expected = windowed
    engine = few(folder, 40)
    assert answers(engine, prompts, greedy()) == expected
    assert answers(engine, prompts, greedy()) == expected
    assert engine.stats().prefix_hit_tokens > 0 and page_table(engine).num_held == 0
    assert [answers(engine, [prompt], greedy())[0] for prompt in prompts] == expected


def test_a_prompt_that_is_asked_again_finds_its_end_behind_a_long_answer(windowed):
    folder, prompts, _ = windowed
    engine, prompt = few(folder), prompts[-1][:200]
    first, before = answers(engine, [prompt], greedy(150)), engine.stats().prefix_hit_tokens
    assert answers(engine, [prompt], greedy(150)) == first
    assert engine.stats().prefix_hit_tokens - before == (len(prompt) - 1) // SIZE * SIZE


@pytest.mark.parametrize(("family", "changes"), [("gemma3", {}), ("mistral", {"sliding_window": 40})])
def test_so_are_those_of_other_windows_and_of_windows_in_every_layer(tmp_path, family, changes):
    model, prompts = save_tiny(tmp_path, family, **changes), random_prompts(VOCAB, LENGTHS)
    expected = [oracle_greedy(model, prompt, 12) for prompt in prompts]
    engine = few(tmp_path, 40)
    assert answers(engine, prompts, greedy()) == expected
    assert answers(engine, prompts, greedy()) == expected
    assert engine.stats().prefix_hit_tokens > 0 and page_table(engine).num_held == 0


def test_preempted_sequences_answer_the_same(windowed):
    folder, prompts, expected = windowed
    engine = few(folder, 15, max_num_seqs=4)
    long_answers = answers(engine, prompts[:5], greedy(100))
    assert engine.stats().num_preemptions > 0
    assert [answer[:12] for answer in long_answers] == expected[:5]


def test_a_long_prompt_holds_its_window_and_what_a_step_computes(windowed):
    folder, prompts, _ = windowed
    engine = few(folder)
    need, held = pages_of_sequence(engine.layout, short_group(engine)), []
    engine.submit(request("a", prompts[-1], greedy(40)))
    while engine.has_work():
        engine.step()
        engine.check()
        held.append(page_table(engine).num_held)
    assert max(held) <= need < len(prompts[-1]) // SIZE and held[-1] == 0


def test_what_many_prompts_push_out_is_computed_again(windowed):
    """Blocks that are found and whose windows are gone make no hit, and the next ones that are computed take their
    place.
    """
    folder, prompts, expected = windowed
    engine = few(folder)
    for _ in range(3):
        for prompt, answer in zip(prompts, expected, strict=True):
            assert answers(engine, [prompt], greedy()) == [answer]
    for others in random_prompts(VOCAB, (200,) * 3, seed=1):
        answers(engine, [others], greedy())
    assert answers(engine, prompts, greedy()) == expected
    hits = engine.stats().prefix_hit_tokens
    assert answers(engine, prompts[-1:], greedy()) == expected[-1:]
    assert engine.stats().prefix_hit_tokens - hits == (len(prompts[-1]) - 1) // SIZE * SIZE


def test_each_turn_of_a_conversation_finds_the_one_before(windowed):
    folder, _, _ = windowed
    engine, text, shares = few(folder, 24), list(random_prompts(VOCAB, (60,))[0]), []
    whole = load_engine(settings(model=str(folder)))
    for turn in range(8):
        before = engine.stats().prefix_hit_tokens
        (answer,) = answers(engine, [text], greedy(20))
        assert answer == answers(whole, [text], greedy(20))[0]
        shares.append((engine.stats().prefix_hit_tokens - before) / max(1, len(text) - 20 if turn else 1))
        text += [*answer, *random_prompts(VOCAB, (20,), seed=turn)[0]]
        for other in random_prompts(VOCAB, (50,), seed=100 + turn):
            answers(engine, [other], greedy(2))
    assert min(shares[1:]) >= 0.75 and min(shares[5:]) >= 0.9  # a block of 16 tokens is the most that is lost


@pytest.mark.parametrize("num_draft", [5, 16])
def test_drafts_change_nothing(windowed, num_draft):
    folder, prompts, expected = windowed
    engine = few(folder, 24, speculate="ngram", draft_tokens=num_draft, adapts_drafts=False)
    repeated = [prompt * 3 for prompt in prompts[1:5]]
    assert answers(engine, repeated, greedy(60)) == answers(few(folder), repeated, greedy(60))
    assert engine.stats().num_drafts > 0 and answers(engine, prompts, greedy()) == expected


def test_drafts_that_are_accepted_take_no_more_pages_than_were_promised(windowed, monkeypatch):
    folder, prompts, _ = windowed
    changes = {"speculate": "ngram", "draft_tokens": 16, "adapts_drafts": False, "synthetic_acceptance": 16.0}
    engine, over = few(folder, 24, **changes), []
    cover = engine.groups.cover

    def watched(lease: PageLease, *facts) -> None:
        cover(lease, *facts)
        if engine.sequences["a"].is_decoding:
            over.append(len(lease.held[0]) - lease.quotas[0])

    monkeypatch.setattr(engine.groups, "cover", watched)
    engine.submit(request("a", prompts[2] * 3, greedy(250)))
    drain(engine)
    assert engine.stats().num_drafts > 9 and max(over) == 0


def test_what_others_left_in_a_page_changes_no_answer(windowed):
    """Not even NaN, where a table is padded or a block has no page any more."""
    folder, prompts, expected = windowed
    engine, outputs = few(folder, 60), []
    assert answers(engine, prompts[3:4], greedy(1)) == [expected[3][:1]]
    assert 0 not in page_table(engine)._free  # pages and blocks are taken from 0 on
    for group in engine.transfer_pool:
        group[:, 0] = 0xFF
    for name, index in (("a", 4), ("b", 6)):
        engine.submit(request(name, prompts[index], greedy()))
    while engine.has_work():
        outputs.append(engine.step())
        both = [engine.sequences.get(name) for name in "ab"]
        assert not any(sequence and 0 in sequence.blocks for sequence in both)
        assert page_table(engine)._holds[0] == 0
    assert [tokens_of(outputs, name) for name in "ab"] == [expected[4], expected[6]]


def test_whole_blocks_are_kept_where_tiers_need_them(windowed):
    folder, prompts, expected = windowed
    engine = load_engine(settings(model=str(folder), kv_cache_nbytes=1 << 20, keeps_whole_blocks=True, **FEW))
    assert engine.groups.are_whole and answers(engine, prompts[:4], greedy()) == expected[:4]
    with pytest.raises(ConfigError, match="keeps_whole_blocks"):
        few(folder).use_lower_tiers(None)


def test_the_rate_is_measured_over_few_pages(windowed):
    engine = few(windowed[0])
    assert engine.measure_prefill_rate() > 0
    engine.check()
    assert page_table(engine).num_held == 0


def prefill(engine: Engine, name: str, prompt: Sequence[int]) -> tuple[list[ChunkDone], Token]:
    engine.submit(request(name, prompt, greedy(), handoff=True))
    outputs = drain(engine)
    (first,) = [s.token for o in outputs for s in o.sampled]
    return [c for o in outputs for c in o.chunks], first


def land(source: Engine, target: Engine, chunks: Sequence[ChunkDone], there: Reservation, known: int) -> list[int]:
    """Copy what a continuation behind `known` tokens needs, group by group, as a transfer would.

    Return how many pages of each group it were.
    """
    counts = []
    for group, skip in enumerate(target.layout.skips(there.skip_tokens, known)):
        for_group = [(c.first_token // SIZE + i, block) for c in chunks for i, block in enumerate(c.blocks)]
        moved = [(place, block) for place, block in for_group if place >= skip // SIZE]
        here = source.groups.pages(group, [block for _, block in moved])
        into = target.groups.pages(group, [there.blocks[place] for place, _ in moved])
        target.transfer_pool[group][:, into] = source.transfer_pool[group][:, here]
        counts.append(len(moved))
    return counts


def test_a_handoff_takes_the_window_alone_and_a_hit_needs_no_more(windowed):
    folder, prompts, expected = windowed
    source, target = (few(folder, 60, max_num_seqs=8) for _ in range(2))
    short = short_group(source)
    for turn in range(2):
        for index, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
            name = f"{turn}-{index}"
            chunks, first = prefill(source, name, prompt)
            there = target.reserve(request(name, prompt, greedy()))
            counts = land(source, target, chunks, there, len(prompt))
            assert counts[short] <= pages_of_sequence(source.layout, short)
            assert counts[1 - short] == target.layout.num_blocks(len(prompt)) - there.skip_tokens // SIZE
            target.adopt(name, first)
            target.incoming_writer_ended(name)
            source.release(name)
            assert [first.token_id, *tokens_of(drain(target), name)] == answer
            source.check()
            target.check()
            assert turn == 0 or there.skip_tokens == (len(prompt) - 1) // SIZE * SIZE
    assert page_table(source).num_held == page_table(target).num_held == 0


def test_what_came_of_a_handoff_that_was_given_up_serves_as_far_as_its_windows_go(windowed):
    folder, prompts, expected = windowed
    source, target, prompt = few(folder), few(folder), prompts[-1]
    chunks, _ = prefill(source, "a", prompt)
    there = target.reserve(request("a", prompt, greedy()))
    land(source, target, chunks[:-1], there, len(prompt))
    target.release("a")
    num_checked = sum(chunk.num_tokens for chunk in chunks[:-1])
    assert target.incoming_writer_ended("a", num_checked) == num_checked
    target.check()
    assert answers(target, [prompt], greedy()) == expected[-1:]  # the blocks of its middle have no window
    again = target.reserve(request("b", prompt, greedy()))
    assert again.skip_tokens == (len(prompt) - 1) // SIZE * SIZE
    target.release("b")
    target.incoming_writer_ended("b")


def test_an_answer_that_moves_keeps_its_window_until_it_is_read(windowed):
    folder, prompts, _ = windowed
    source, target, prompt = few(folder, 24), few(folder, 24), prompts[-1][:250]
    alone = answers(load_engine(settings(model=str(folder))), [prompt], greedy(90))[0]
    source.submit(request("a", prompt, greedy(90)))
    tokens: list[Token] = []

    def step(until: int) -> None:
        while len(tokens) < until:
            tokens.extend(s.token for s in source.step().sampled)
            source.check()

    step(3)
    shown = [token.token_id for token in tokens]
    known, most = len(prompt) + 3, len(prompt) + 3 + 60
    source.exports.begin("a", known, most)
    asked = replace(request("a", [*prompt, *shown], greedy(90)), num_answered=len(shown))
    there = target.reserve(asked, num_tokens=most)
    chunks = []
    for until in (20, 33, 50):
        step(until)
        if chunk := source.exports.blocks("a"):
            chunks.append(chunk)
    assert source.exports.pause("a") and source.exports.is_kept("a")
    while (tail := source.exports.tail("a")) is None:
        step(len(tokens) + 1)
    chunks += [tail.chunk] if tail.chunk else []
    counts = land(source, target, chunks, there, known)
    assert counts[short_group(source)] <= pages_of_sequence(source.layout, short_group(source)) + 60 // SIZE + 1
    target.adopt("a", tokens[-1], tokens[3:-1])
    source.release("a")
    assert page_table(source).num_held > 0
    source.exports.reader_ended("a")
    assert page_table(source).num_held == 0
    target.check()
    target.incoming_writer_ended("a")
    assert [t.token_id for t in tokens] + tokens_of(drain(target), "a") == alone
    source.check()


def test_an_answer_whose_window_has_no_room_to_grow_does_not_move(windowed):
    folder, prompts, _ = windowed
    engine = few(folder)
    engine.submit(request("a", prompts[-1][:200], greedy(90)))
    while not engine.sequences["a"].is_decoding:
        engine.step()
    with pytest.raises(OutOfBlocks, match="no room for a window that grows"):
        engine.exports.begin("a", 200, 200 + 16 * page_table(engine).num_pages)
    engine.exports.begin("a", 200, 210)
    engine.exports.reader_ended("a")
    engine.check()
    drain(engine)


def test_an_answer_goes_on_beyond_a_move_that_was_given_up(windowed):
    folder, prompts, _ = windowed
    engine, prompt = few(folder, 30), prompts[3]
    alone = answers(load_engine(settings(model=str(folder))), [prompt], greedy(250))[0]
    engine.submit(request("a", prompt, greedy(250)))
    tokens: list[int] = []

    def step(until: int) -> None:
        while engine.has_work() and len(tokens) < until:
            tokens.extend(s.token.token_id for s in engine.step().sampled)
            engine.check()
            if tokens and (sequence := engine.sequences.get("a")) and sequence.lease:
                assert len(sequence.lease.held[0]) <= sequence.lease.quotas[0]

    step(3)
    engine.exports.begin("a", len(prompt) + 3, len(prompt) + 20)
    step(120)
    engine.exports.reader_ended("a")
    assert page_table(engine).num_held <= pages_of_sequence(engine.layout, short_group(engine))
    step(250)
    assert tokens == alone and page_table(engine).num_held == 0


def test_blocks_that_a_peer_reads_are_those_behind_which_it_can_go_on(windowed):
    folder, prompts, _ = windowed
    engine, prompt = few(folder, 40), prompts[-1]
    answers(engine, [prompt], greedy())
    sequence = engine._intake.sequence_of(request("digests", prompt, greedy()))
    digests = list(sequence.extend_digests(SIZE, len(prompt) // SIZE))
    assert engine.prefix_exports.count(digests) == len(digests)
    blocks = engine.prefix_exports.hold("peer", digests[2:], 2 * SIZE)
    assert len(blocks) == len(digests) - 2
    start = engine.layout.first_needed(short_group(engine), len(digests) * SIZE) // SIZE
    assert engine.groups.pages(short_group(engine), blocks[start - 2 :])
    engine.check()
    for other in random_prompts(VOCAB, (200,) * 3, seed=1):
        answers(engine, [other], greedy())
    assert engine.prefix_exports.count(digests) == len(digests)  # held
    engine.prefix_exports.reader_ended("peer")
    engine.check()
