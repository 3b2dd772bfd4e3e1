"""What a batch asks of a GPU, worked out on the host: plain functions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.cuda.inputs.batch_inputs import (
    block_tables,
    decode_rows,
    decode_tables,
    in_segments,
    num_decodes,
    prompt_rows,
    tails_of,
)
from engine.cuda.inputs.buckets import batch_buckets, bucket_for, chunk_buckets, context_buckets
from engine.cuda.inputs.decode_state import DecodeState, Word, pack
from engine.cuda.inputs.sampling_columns import DrawnRow, columns, draw_keys, is_greedy
from engine.cuda.runtime.upload import upload_all
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from engine.speculative.proposer import Draft

SIZE, SPARE = 64, 99


def sequence(name, num_prompt, num_generated=0, blocks=(), **sampling):
    params = SamplingParams(**{"max_tokens": 50, "seed": 3, "temperature": 0.0, **sampling})
    made = Sequence(RequestId(name), range(100, 100 + num_prompt), params)
    made.tokens.extend(range(500, 500 + num_generated))
    made.blocks.extend(blocks)
    return made


def decode(name, num_prompt, num_generated, blocks, **sampling):
    made = sequence(name, num_prompt, num_generated, blocks, **sampling)
    return ScheduledChunk(made, len(made.tokens) - 1, 1)


@pytest.mark.parametrize("largest", [1, 64, 70, 512, 2048, 2079, 8192])
def test_chunks_of_a_usual_budget_are_held_and_pad_few(largest):
    buckets = chunk_buckets(largest)
    assert buckets[-1] == min(largest, 2048) and list(buckets) == sorted(set(buckets))
    for count in range(1, buckets[-1] + 1):
        assert bucket_for(buckets, count) - count < 64


@pytest.mark.parametrize("largest", [1, 3, 8, 64, 100, 256, 300])
def test_every_batch_finds_a_bucket_that_is_not_much_larger(largest):
    buckets = batch_buckets(largest)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == largest
    for count in range(1, largest + 1):
        bucket = bucket_for(buckets, count)
        assert count <= bucket <= max(count + 7, count * 1.25, 2 * count if count <= 4 else 0)


def test_context_buckets_end_at_the_longest():
    assert context_buckets(8192) == (2048, 8192)
    assert context_buckets(2048) == (2048,)
    assert context_buckets(131072) == (2048, 16384, 131072)


def test_decodes_come_first_and_end_at_the_first_that_is_none():
    pieces = [decode("a", 5, 1, [0]), decode("b", 5, 3, [1]), ScheduledChunk(sequence("c", 9, 0, [2]), 0, 9)]
    assert num_decodes(pieces) == 2
    assert num_decodes(pieces[2:]) == 0
    recomputed = ScheduledChunk(sequence("d", 5, 3, [3]), 5, 1)  # an answer's token, but not its newest
    assert num_decodes([recomputed]) == 0


def test_rows_of_prompts_lie_where_their_blocks_are():
    pieces = [ScheduledChunk(sequence("a", 70, 0, [7, 3]), 60, 10), ScheduledChunk(sequence("b", 90, 0, [5, 4]), 0, 64)]
    rows = prompt_rows(pieces, SIZE)
    assert rows.queries.counts.tolist() == [10, 64]
    assert rows.positions.tolist() == [*range(60, 70), *range(64)]
    assert rows.slots.tolist() == [*range(7 * 64 + 60, 8 * 64), *range(3 * 64, 3 * 64 + 6), *range(5 * 64, 6 * 64)]
    assert rows.token_ids.tolist() == [*range(160, 170), *range(100, 164)]
    assert rows.queries.lengths.tolist() == [70, 64]
    assert (rows.queries.q_starts.tolist(), rows.queries.kv_starts.tolist()) == ([0, 10, 74], [0, 70, 134])
    assert rows.queries.tables.tolist() == [[7, 3], [5, 4]]
    assert rows.sample_rows.tolist() == [9]  # the second prompt goes on


def test_decodes_take_tokens_from_where_they_are_and_pad_with_the_spare_block():
    known, pending = decode("a", 63, 2, [8, 2]), decode("b", 10, 1, [6])
    pending.sequence.num_pending = 1
    rows = decode_rows([known, pending], {RequestId("b"): 5}, 16, 4, SIZE, SPARE)
    assert rows.lengths.tolist() == [65, 11, 1, 1]
    assert rows.slots.tolist() == [2 * 64, 6 * 64 + 10, SPARE * 64, SPARE * 64]
    assert rows.sources.tolist() == [16, 5, 18, 19]
    assert rows.token_ids.tolist() == [501, 0, 0, 0]
    tables = block_tables([known, pending], 4, 2, SPARE)
    assert tables.tolist() == [[8, 2], [6, SPARE], [SPARE, SPARE], [SPARE, SPARE]]


def test_drafted_tokens_have_rows_behind_the_newest_one_of_their_sequence():
    alone, drafted = decode("a", 63, 2, [8, 2]), decode("b", 62, 1, [6, 9])
    drafted = replace(drafted, draft=Draft((31, 32, 33)))
    rows = decode_rows([alone, drafted], {}, 16, 8, SIZE, SPARE)
    assert rows.lengths.tolist() == [65, 63, 64, 65, 66, 1, 1, 1]
    assert rows.behind.tolist() == [0, 0, 1, 2, 3, 0, 0, 0]
    assert rows.token_ids.tolist() == [501, drafted.sequence.tokens[-1], 31, 32, 33, 0, 0, 0]
    assert rows.slots[:5].tolist() == [2 * 64, 6 * 64 + 62, 6 * 64 + 63, 9 * 64, 9 * 64 + 1]
    assert rows.sources.tolist() == [16 + row for row in range(8)]
    tables = decode_tables([alone, drafted], 8, 2, SPARE)
    assert tables.tolist() == [[8, 2], *[[6, 9]] * 4, *[[SPARE, SPARE]] * 3]
    places = [DrawnRow(drafted.sequence, place) for place in range(4)]
    assert columns(places).positions.tolist() == [63, 64, 65, 66]


def test_what_is_packed_is_what_the_device_reads():
    pieces = [decode("a", 63, 2, [8, 2], temperature=0.5, top_k=7), decode("b", 10, 1, [6], top_p=0.25, min_p=0.125)]
    pieces[1].sequence.num_pending = 1
    drawn = [DrawnRow(piece.sequence) for piece in pieces]
    state = DecodeState(5, 2, 10, torch.device("cpu"))
    state.sampled.copy_(torch.arange(70, 75))
    rows = decode_rows(pieces, {RequestId("b"): 3}, 5, 4, SIZE, SPARE)
    state.put(pack(rows, columns(drawn), 5))
    assert state.gather_tokens(2).tolist() == [501, 73]
    assert state.sampled.tolist() == [70, 71, 72, 73, 74]
    assert state.lengths.tolist() == [65, 11, 1, 1, 0]
    assert state.positions[:4].tolist() == [64, 10, 0, 0]
    assert state.slots[:2].tolist() == [128, 394]
    inputs = state.draw_inputs(2)
    assert inputs.temperatures.tolist() == [0.5, 0.0]
    assert inputs.top_ks.tolist() == [7, 0]
    assert inputs.top_ps.tolist() == [1.0, 0.25]
    assert inputs.min_ps.tolist() == [0.0, 0.125]
    assert inputs.positions.tolist() == [65, 11]
    assert inputs.seeds.tolist() == columns(drawn).seeds.tolist()
    assert all(word % 2 == 0 for word in (Word.DRAWN, Word.GIVEN, Word.SEEDS, Word.SLOTS))  # 64 bits, aligned


def test_a_draw_is_keyed_by_seed_and_choice_whole():
    seeds = [0, 1, 1 << 40, -1, (1 << 64) - 1]
    keys = draw_keys(seeds * 2, [0] * 5 + [1] * 5)
    assert keys.dtype == np.int64
    assert keys[3] == keys[4]  # -1 is that seed modulo 2^64
    assert len(set(keys.tolist())) == 8
    assert draw_keys([7], [2]).tolist() == draw_keys([7], [2]).tolist() != draw_keys([2], [7]).tolist()


def test_a_batch_is_greedy_if_all_of_it_is():
    assert is_greedy([sequence("a", 3), sequence("b", 3)])
    assert not is_greedy([sequence("a", 3), sequence("b", 3, temperature=0.1)])


def test_prompts_in_segments_are_sequences_that_begin_with_a_segments_page():
    """Tokens 100 to 300 of one sequence, the first 128 of another, in segments of 128."""
    first = sequence("a", 300, 0, [10, 11, 12, 13, 14])
    rows = prompt_rows([ScheduledChunk(first, 100, 200), ScheduledChunk(sequence("b", 128, 0, [20, 21]), 0, 128)], SIZE)
    by = in_segments(rows.queries, 128, SIZE)
    assert by.tables[:, 0].tolist() == [10, 12, 14, 20] and by.tables[1].tolist() == [12, 13]
    assert by.lengths.tolist() == [128, 128, 44, 128]
    assert by.q_starts.tolist() == [0, 28, 156, 200, 328] and by.counts.tolist() == [28, 128, 44, 128]
    assert by.kv_starts.tolist() == [0, 128, 256, 300, 428]


def test_what_goes_to_the_device_together_lies_there_as_if_it_had_gone_alone():
    arrays = [
        np.arange(5, dtype=np.int32), np.arange(3), np.zeros(0, np.int64), np.arange(12, dtype=np.int32).reshape(3, 4),
        np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2], np.linspace(0, 1, 200, dtype=np.float32),
    ]  # fmt: skip
    sent = upload_all(arrays, torch.device("cpu"))
    for array, there in zip(arrays, sent, strict=True):
        assert there.tolist() == array.tolist() and there.dtype == torch.from_numpy(array).dtype
        assert there.storage_offset() * there.itemsize % 512 == 0 and there.is_contiguous()
    arrays[1][:] = 7
    assert sent[1].tolist() == [0, 1, 2]


def test_tails_are_queries_of_their_own_behind_the_same_contexts():
    """The last row of one piece is wanted, none of another, and all but the first three of a third."""
    pieces = [
        ScheduledChunk(sequence("a", 300, 0, [10, 11, 12, 13, 14]), 100, 200),
        ScheduledChunk(sequence("b", 200, 0, [20, 21, 22, 23]), 0, 64),
        ScheduledChunk(sequence("c", 70, 0, [30, 31]), 64, 6),
    ]
    queries = prompt_rows(pieces, SIZE).queries
    left, tails = tails_of(queries, np.array([199, 269, 267, 268]))
    assert left.tolist() == [199, 267, 268, 269]
    assert tails.lengths.tolist() == [300, 70] and tails.counts.tolist() == [1, 3]
    assert tails.tables[:, 0].tolist() == [10, 30] and tails.kv_starts.tolist() == [0, 300, 370]
    by = in_segments(tails, 128, SIZE)
    assert by.tables[:, 0].tolist() == [14, 30] and by.lengths.tolist() == [44, 70]
    left, tails = tails_of(queries, np.array([], np.int64))
    assert not len(left) and not len(tails.lengths)
