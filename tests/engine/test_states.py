"""Recurrent layers: answers are those of transformers, to the bit however a prompt is cut; no state is another's."""

# pyright: reportArgumentType=false
# Plain strings stand for request ids.

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.models.transformers_oracle import greedy as oracle_greedy
from contracts.errors import ConfigError, OutOfBlocks
from contracts.hashing import chain_hashes
from engine.cpu.decoder import Decoder
from engine.engine import Engine
from engine.loader import load_engine
from engine.speculative.choice import PROPOSERS
from tests.engine.driving import answers, drain, greedy, random_prompts, request, scored, settings, tokens_of
from tests.engine.speculative.drafting import KnowingProposer
from tests.engine.test_windows import land, page_table, prefill
from tests.engine.tiny_models import MIXED, VOCAB, as_multimodal, change_config, save_tiny

pytestmark = pytest.mark.slow

LENGTHS = (1, 5, 16, 17, 40, 150, 300)
SIZE = 16
FEW = {"max_batched_tokens": 48, "max_mixed_tokens": 16, "max_num_seqs": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A tiny model's folder, prompts, and transformers' 64 greedy tokens after each."""
    folder = tmp_path_factory.mktemp("states")
    reference = save_tiny(folder, "qwen3_next")
    prompts = random_prompts(VOCAB, LENGTHS)
    return folder, prompts, [oracle_greedy(reference, prompt, 64) for prompt in prompts]


def few(folder: Path, num_blocks: int = 40, **changes) -> Engine:
    """An engine with states for two rounds of its sequences, and about so many blocks."""
    layout, given = load_engine(settings(model=str(folder))).layout, FEW | changes
    num_states = 4 * given["max_num_seqs"]
    nbytes = num_states * layout.group_nbytes(1) + num_blocks * layout.group_nbytes(0)
    engine = load_engine(settings(model=str(folder), kv_cache_nbytes=nbytes, **given))
    assert page_table(engine).num_pages < engine.pool.num_blocks
    return engine


def test_answers_of_64_tokens_are_those_of_transformers_alone_and_in_a_batch(model):
    folder, prompts, expected = model
    assert [answers(few(folder), [prompt], greedy(64))[0] for prompt in prompts] == expected
    engine = few(folder)
    assert answers(engine, prompts, greedy(64)) == expected
    assert answers(engine, prompts[::-1], greedy(64)) == expected[::-1]
    assert engine.stats().prefix_hit_tokens > 0 and page_table(engine).num_held == 0


def test_a_recurrent_layer_may_be_the_last_and_its_config_may_say_no_kinds(tmp_path):
    kinds = {"layer_types": None, "full_attention_interval": 2, "mlp_only_layers": []}
    reference, prompts = save_tiny(tmp_path, "qwen3_next", **kinds), random_prompts(VOCAB, [5, 40, 150])
    change_config(tmp_path, kinds)
    expected = [oracle_greedy(reference, prompt, 24) for prompt in prompts]
    assert answers(load_engine(settings(model=str(tmp_path))), prompts, greedy(24)) == expected


def test_a_prompt_is_the_same_to_the_bit_however_it_is_cut(model):
    folder, prompts, _ = model
    whole = scored(folder, prompts[-1])
    assert scored(folder, prompts[-1], max_batched_tokens=16) == whole
    assert scored(folder, prompts[-1], max_batched_tokens=50) == whole


def test_a_conversation_of_ten_turns_finds_what_went_before(model):
    """It is asked beside other requests, and with states for few of them."""
    folder, _, _ = model
    engine, text, shares = few(folder), list(random_prompts(VOCAB, (150,))[0]), []
    whole = load_engine(settings(model=str(folder), kv_cache_nbytes=8 << 20, prefix_cache=False))
    for turn in range(10):
        before, known = engine.stats().prefix_hit_tokens, len(text) - 15
        (answer,) = answers(engine, [text], greedy(15))
        assert answer == answers(whole, [text], greedy(15))[0]
        if turn:
            shares.append((engine.stats().prefix_hit_tokens - before) / known)
        text += [*answer, *random_prompts(VOCAB, (15,), seed=turn)[0]]
        for other in random_prompts(VOCAB, (50,), seed=100 + turn):
            answers(engine, [other], greedy(2))
    assert len(shares) == 9 and min(shares) >= 0.9


def test_a_prompt_that_others_share_in_part_is_found_where_the_second_went_on(model):
    folder, prompts, _ = model
    engine, shared = few(folder), prompts[-1][:160]
    for turn, hit in enumerate((0, 144, 160)):  # the first chunk's ends are at 48, 96, 144; the second left one at 160
        before = engine.stats().prefix_hit_tokens
        answers(engine, [[*shared, *random_prompts(VOCAB, (30,), seed=turn + 5)[0]]], greedy(2))
        assert engine.stats().prefix_hit_tokens - before == hit


def test_preempted_answers_go_on_as_if_they_had_not_been(model):
    folder, prompts, expected = model
    engine = few(folder, 16, max_num_seqs=4)
    assert [answer[:64] for answer in answers(engine, prompts[:6], greedy(120))] == expected[:6]
    assert engine.stats().num_preemptions > 0


def test_a_batch_that_fails_after_its_layers_takes_no_token_in_twice(model, monkeypatch):
    folder, prompts, expected = model
    engine, num_failed = few(folder), 0
    forward = Decoder.forward

    def failing(decoder, inputs, *rest):
        nonlocal num_failed
        logits = forward(decoder, inputs, *rest)
        if len(inputs.states.pieces) > 1:
            num_failed += 1
            raise RuntimeError("no memory is left")
        return logits

    monkeypatch.setattr(Decoder, "forward", failing)
    assert answers(engine, prompts[:3], greedy(24)) == [answer[:24] for answer in expected[:3]]
    assert num_failed > 20


@pytest.mark.parametrize("num_draft", [3, 16])
def test_wrong_guesses_leave_no_trace_and_right_ones_a_state(model, monkeypatch, num_draft):
    """Also in what was cached: the second round goes on behind answers of which some tokens were guessed."""
    folder, prompts, expected = model
    monkeypatch.setitem(PROPOSERS, "knowing", KnowingProposer)
    engine = few(folder, 60, speculate="knowing", draft_tokens=num_draft, adapts_drafts=False)
    prompts, expected = prompts[1:], expected[1:]
    KnowingProposer.answers = dict(zip(map(tuple, prompts), expected, strict=True))
    assert answers(engine, prompts, greedy(64)) == expected
    further = [[*prompt, *answer[:40]] for prompt, answer in zip(prompts, expected, strict=True)]
    KnowingProposer.answers |= {tuple(text): answer[40:] for text, answer in zip(further, expected, strict=True)}
    for text, answer in zip(further[::-1], expected[::-1], strict=True):
        assert answers(engine, [text], greedy(24)) == [answer[40:]]
    stats = engine.stats()
    assert stats.num_drafts > 20 and 0 < sum(stats.num_accepted_by_place) < stats.num_draft_tokens
    assert stats.prefix_hit_tokens > 100 and page_table(engine).num_held == 0


def test_a_handoff_takes_the_last_state_alone_and_a_hit_needs_no_more(model):
    folder, prompts, expected = model
    source, target = few(folder, 60), few(folder, 60)
    for turn in range(2):
        for index, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
            name = f"{turn}-{index}"
            chunks, first = prefill(source, name, prompt)
            there = target.reserve(request(name, prompt, greedy(24)))
            here = there.skip_tokens // SIZE
            assert land(source, target, chunks, there, len(prompt)) == [-(-len(prompt) // SIZE) - here, 1]
            target.adopt(name, first)
            target.incoming_writer_ended(name)
            source.release(name)
            assert [first.token_id, *tokens_of(drain(target), name)] == answer[:24]
            source.check()
            assert turn == 0 or there.skip_tokens == (len(prompt) - 1) // SIZE * SIZE
        text = [*prompts[-1], *expected[-1][:24], 7, 8]  # the decode side keeps a state where the answer ended
    assert target.prefix_exports.count(chain_hashes(text, SIZE)) == (len(prompts[-1]) + 23) // SIZE
    assert page_table(source).num_held == page_table(target).num_held == 0


def test_what_cannot_be_is_refused_by_name(model):
    folder, prompts, _ = model
    with pytest.raises(ConfigError, match=r"keeps_whole_blocks.*without tiers"):
        few(folder, keeps_whole_blocks=True)
    engine = few(folder)
    engine.submit(request("a", prompts[3], greedy(20)))
    while not engine.sequences["a"].is_decoding:
        engine.step()
    with pytest.raises(OutOfBlocks, match="recurrent layers is overwritten"):
        engine.exports.begin("a", 17, 30)
    drain(engine)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types must say linear_attention or full_attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3, no multiple of linear_num_key_heads, 2"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ({"linear_key_head_dim": 8}, r"in_proj_qkvz.weight' is \[256, 96\]; its configuration says \[224, 96\]"),
        ({"attn_output_gate": False}, "attn_output_gate is false"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_its_field(tmp_path, changes, words):
    save_tiny(tmp_path, "qwen3_next")
    change_config(tmp_path, changes)
    with pytest.raises(ConfigError, match=words):
        load_engine(settings(model=str(tmp_path)))


def test_a_released_folder_is_read(tmp_path, caplog):
    """It has a vision tower and MTP layers beside, and the experts of a layer in one tensor."""
    reference, prompts = save_tiny(tmp_path, "qwen3_5_moe"), random_prompts(VOCAB, [5, 40])
    expected = [oracle_greedy(reference, prompt, 12) for prompt in prompts]
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts"
        each = [
            [tensors.pop(f"{stem}.{number}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for number in range(MIXED["num_experts"])
        ]
        tensors[f"{stem}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
        tensors[f"{stem}.down_proj"] = torch.stack([down for *_, down in each])
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    mtp = {name: torch.ones(2, 2) for name in ("mtp.fc.weight", "mtp.layers.0.input_layernorm.weight")}
    save_file(named | mtp, file)
    as_multimodal(tmp_path, "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "model.visual.merger")
    save_file({name.removeprefix("language_model."): tensor for name, tensor in load_file(file).items()}, file)
    with caplog.at_level(logging.INFO):
        assert answers(load_engine(settings(model=str(tmp_path))), prompts, greedy()) == expected
    assert "2 tensors that predict further tokens (MTP) are not read" in caplog.text
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    change_config(tmp_path, {"text_config": text | {"num_experts": 9}})
    with pytest.raises(ConfigError, match=r"_proj' is of 8 experts, its configuration of 9"):
        load_engine(settings(model=str(tmp_path)))
