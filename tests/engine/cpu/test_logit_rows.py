"""The last layer attends only for rows whose logits are wanted; what those are does not depend on who goes beside."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts.ids import RequestId
from contracts.layout import KVLayout
from engine.cpu.attention import attend
from engine.cpu.batch_inputs import prepare
from engine.cpu.head_shape import HeadShape
from engine.cpu.kv_cache import KVCache
from engine.loader import load_engine
from engine.model.logit_rows import tail_rows, tails
from engine.sampling.prompt_logprobs import spans
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from kernels.registry import Registry
from tests.engine.device_engines import device_engine
from tests.engine.driving import greedy, random_prompts, settings
from tests.engine.tiny_models import VOCAB, save_tiny

# Of a layer's kinds: plain, windows and sinks, segments, experts.
KINDS = ("llama", "gpt_oss", "llama4", "qwen3_moe")


@given(st.lists(st.tuples(st.integers(1, 9), st.sets(st.integers(0, 8), max_size=3)), min_size=1, max_size=6))
def test_a_tail_begins_with_the_first_row_that_is_wanted(pieces):
    counts, wanted, expected, first = np.array([count for count, _ in pieces]), [], [], 0
    for count, places in pieces:
        places = sorted(place for place in places if place < count)
        wanted += [first + place for place in places]
        expected += range(first + places[0], first + count) if places else []
        first += count
    lasts = tails(counts, np.array(wanted[::-1], np.int64))
    assert tail_rows(counts, lasts).tolist() == expected
    assert (lasts >= 0).all() and (lasts <= counts).all()


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(folder, request.param)
    return folder


@pytest.fixture(params=["cpu", "device"])
def engine(request, folder):
    return load_engine(settings(model=str(folder))) if request.param == "cpu" else device_engine(folder)


# Two decodes and a lone token of an answer that is computed again; several of one; prompts: one whose chunk is not its
# last, one that is scored, one that is scored and goes on, one that is short, one that ends behind a context.
# Tokens of prompt and answer, how many are computed, how many are now, whether it is scored:
SHAPES = [
    (70, 3, 72, 1, False), (62, 10, 63, 1, False), (9, 60, 68, 1, False), (50, 90, 64, 76, False),
    (200, 0, 64, 64, False), (90, 0, 0, 90, True), (140, 0, 64, 64, True), (1, 0, 0, 1, False),
    (150, 0, 128, 22, False),
]  # fmt: skip
WANTED = [1, 0, 1, 1, 0, 90, 64, 1, 1]


def mixed_batch(size):
    pieces, first_block = [], 0
    for index, (num_prompt, num_answer, computed, count, is_scored) in enumerate(SHAPES):
        tokens = random_prompts(VOCAB, (num_prompt + num_answer,), seed=index)[0]
        params = greedy(prompt_logprobs=2 if is_scored else None)
        sequence = Sequence(RequestId(str(index)), tokens[:num_prompt], params)
        sequence.tokens.extend(tokens[num_prompt:])
        num_blocks = -(-len(tokens) // size)
        sequence.blocks.extend(range(first_block, first_block + num_blocks))
        first_block += num_blocks
        sequence.num_scored = min(computed + 1, num_prompt) if is_scored else num_prompt
        pieces.append(ScheduledChunk(sequence, computed, count))
    return pieces


def computed_before(engine):
    """A mixed batch, whose contexts are there."""
    pieces = mixed_batch(engine.layout.block_size)
    for piece in pieces:
        prompt, length = piece.sequence.num_prompt, piece.first_token
        blocks, lease = piece.sequence.blocks, engine.groups.nothing()
        engine.groups.cover(lease, blocks, 0, 0, len(piece.sequence.tokens))  # a page each where windows have few
        for low, high in ((0, min(length, prompt)), (prompt, length)):
            if high > low:
                engine.runner.forward_without_sampling([ScheduledChunk(piece.sequence, low, high - low)])
    return pieces


def test_rows_of_a_mixed_batch_are_what_they_are_alone(engine):
    pieces = computed_before(engine)
    together = engine.runner.forward_without_sampling(pieces)
    alone = [engine.runner.forward_without_sampling([piece]) for piece in pieces]
    logits = torch.cat([computed.logits for computed in alone])
    assert together.logits.shape[0] == sum(piece.samples for piece in pieces) == 6
    assert torch.allclose(together.logits, logits, atol=1e-4, rtol=1e-4)
    engine.runner.wait()
    told = [scores.told() for scores in together.scored]
    told_alone = [scores.told() for computed in alone for scores in computed.scored]
    places = [(scored.request_id, scored.first_index, len(scored.tokens)) for scored in told]
    assert places == [("5", 1, 64), ("5", 65, 25), ("6", 65, 64)]
    for scored, by_itself in zip(told, told_alone, strict=True):
        assert [token.rank for token in scored.tokens] == [token.rank for token in by_itself.tokens]
        own = [token.logprob for token in by_itself.tokens]
        assert [token.logprob for token in scored.tokens] == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("limit", [{}, {"window": 40}, {"segment": 64}], ids=lambda limit: next(iter(limit), "whole"))
def test_attention_of_tails_has_the_bits_of_attention_of_all_rows(limit, dtype):
    pieces, heads = mixed_batch(16), HeadShape(6, 2, 32, 0.2, **limit)
    cache = KVCache(
        KVLayout.uniform(model="m", num_layers=1, num_kv_heads=2, head_dim=32, block_size=16, dtype=dtype), 80
    )
    cache.pages(0).normal_()
    inputs = prepare(pieces, spans(pieces), heads, cache)
    assert inputs.logit_rows is not None
    assert inputs.logit_rows.rows.tolist() == tail_rows(np.array([s[3] for s in SHAPES]), np.array(WANTED)).tolist()
    q = torch.randn(len(inputs.token_ids_M), 6, 32).to(cache.dtype)
    for has_window in (True, False):
        sinks = torch.randn(2, 3) if limit else None
        whole = attend(q, cache.pages(0), inputs.attention.of(has_window), heads, sinks)
        ends = attend(
            q[inputs.logit_rows.rows], cache.pages(0), inputs.logit_rows.attention.of(has_window), heads, sinks
        )
        assert torch.equal(ends, whole[inputs.logit_rows.rows])


def test_rows_that_nobody_wants_go_no_further_than_the_last_k_and_v(folder, monkeypatch):
    """In the last layer queries are attended for by piece; a chunk that says nothing of a token has none."""
    engine, noted = load_engine(settings(model=str(folder))), []
    pieces = computed_before(engine)
    monkeypatch.setattr("engine.cpu.decoder.attend", lambda q, *rest: noted.append(len(q)) or attend(q, *rest))
    engine.runner.forward_without_sampling(pieces)
    assert noted == [sum(count for *_, count, _ in SHAPES)] * (engine.checkpoint.config.num_layers - 1) + [sum(WANTED)]
    noted.clear()
    assert engine.runner.forward_without_sampling([pieces[4]]).logits.shape == (0, VOCAB)
    assert noted == [64] * (engine.checkpoint.config.num_layers - 1) + [0]


def test_rows_that_nobody_wants_go_no_further_than_the_last_k_and_v_on_a_device(folder, monkeypatch):
    """There newest tokens attend as decodes do, and rows that are scored by piece."""
    get, noted = Registry.get, []

    def get_noted(registry, op, spec):
        run = get(registry, op, spec)

        def noting(q, *args, **options):
            noted.append((op, len(q)))
            run(q, *args, **options)

        return noting if op in ("attn_prefill", "attn_decode") else run

    monkeypatch.setattr(Registry, "get", get_noted)
    engine = device_engine(folder)
    pieces = computed_before(engine)[3:]  # no decodes, which go by themselves
    noted.clear()
    engine.runner.forward_without_sampling(pieces)
    whole = [("attn_prefill", sum(count for *_, count, _ in SHAPES[3:]))] * (engine.checkpoint.config.num_layers - 1)
    assert noted == [*whole, ("attn_decode", 4), ("attn_prefill", 90 + 64)]
    noted.clear()
    assert engine.runner.forward_without_sampling([pieces[1]]).logits.shape == (0, VOCAB)
    assert noted == [("attn_prefill", 64)] * (engine.checkpoint.config.num_layers - 1)
