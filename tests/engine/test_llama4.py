"""What sets Llama 4 apart: each part of it beside transformers, or shown to matter; its multimodal folders."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bench.models.transformers_oracle import greedy as oracle_greedy
from contracts.errors import ConfigError
from engine.loader import load_engine
from engine.model.chunked_attention import AttentionChunks, cut
from tests.engine.driving import answers, greedy, random_prompts, scored, settings
from tests.engine.tiny_models import LLAMA3_ROPE, VOCAB, as_multimodal, change_config, save_tiny

PROMPTS = random_prompts(VOCAB, (5, 63, 64, 129, 200))
AS_SCOUT = {"interleave_moe_layer_step": 1, "rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}


@pytest.mark.parametrize(
    "changes",
    [
        AS_SCOUT,
        {"use_qk_norm": False, "attn_temperature_tuning": False},
        {"no_rope_layers": [0, 1, 1, 0], "moe_layers": [0, 3]},
        {"attention_chunk_size": 128, "layer_types": ["chunked_attention", "full_attention"] * 2},
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ],
)
def test_other_llama4s_are_those_of_transformers(tmp_path, changes):
    model = save_tiny(tmp_path, "llama4", **changes)
    expected = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS]
    assert answers(load_engine(settings(model=str(tmp_path))), PROMPTS, greedy()) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_chunk_size": 128},
        {"layer_types": ["full_attention"] * 4},
        {"no_rope_layers": [1, 1, 0, 1]},
        {"attn_scale": 0.45},
        {"floor_scale": 31},
        {"use_qk_norm": False},
        {"rope_parameters": LLAMA3_ROPE | {"factor": 8.5}},
    ],
)
def test_a_little_of_what_sets_llama4_apart_shows(tmp_path, changes):
    save_tiny(tmp_path, "llama4")
    before = scored(tmp_path, PROMPTS[-1])
    change_config(tmp_path, changes)
    assert np.abs(np.array(scored(tmp_path, PROMPTS[-1])) - before).max() > 1e-3


def test_the_text_part_of_a_multimodal_folder_is_served(tmp_path, caplog):
    save_tiny(tmp_path, "llama4")
    expected = answers(load_engine(settings(model=str(tmp_path))), PROMPTS, greedy())
    as_multimodal(tmp_path)
    with caplog.at_level(logging.INFO):
        engine = load_engine(settings(model=str(tmp_path)))
    assert answers(engine, PROMPTS, greedy()) == expected
    assert "2 tensors of the vision tower are not read: text alone is served" in caplog.text
    assert engine.checkpoint.eos_token_ids == (1,)


def test_experts_of_another_shape_are_refused(tmp_path):
    """All in one tensor, the other way round than elsewhere."""
    save_tiny(tmp_path, "llama4")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.feed_forward.experts.down_proj"
    save_file(tensors | {name: tensors[name].transpose(1, 2).contiguous()}, file)
    with pytest.raises(ConfigError, match=r"experts.down_proj' is \[8, 96, 64\]; its configuration says \[8, 64, 96\]"):
        load_engine(settings(model=str(tmp_path)))


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(1, 300)), min_size=1, max_size=5), st.integers(1, 4))
def test_rows_cut_into_segments_find_the_tokens_of_theirs(pieces, num_steps):
    """Each row's context, through the tables: positions from the last multiple of the segment on."""
    segment, block_size = 64 * num_steps, 16
    starts, counts = (np.array(values) for values in zip(*pieces, strict=True))
    width = -(-int((starts + counts).max()) // block_size)
    tables = np.arange(len(pieces) * width).reshape(len(pieces), width)  # block b of piece p is p * width + b
    answers = np.arange(len(pieces)) % 2 == 0
    by = cut(AttentionChunks(tables, starts, counts, answers), segment, block_size)
    owners = by.tables[:, 0] // width
    found = [
        [owner, *seen(by.tables[at], by.starts[at] + row, block_size, owner * width)]
        for at, owner in enumerate(owners)
        for row in range(by.counts[at])
    ]
    assert (by.answers == answers[owners]).all()
    rows = [(owner, start + row) for owner, (start, count) in enumerate(pieces) for row in range(count)]
    assert found == [[owner, at // segment * segment, at] for owner, at in rows]


def seen(table: np.ndarray, newest: int, block_size: int, first_block: int) -> tuple[int, int]:
    """The first and the newest position that the row at `newest` of a segment sees."""
    first, last = ((table[at // block_size] - first_block) * block_size + at % block_size for at in (0, newest))
    return first, last
