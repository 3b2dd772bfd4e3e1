"""How prefill attention shares keys out: by shapes alone, and never more than the workspace has room for."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.specs import AttnSpec
from kernels.triton.prefill_parts import LEAST, num_parts, share_keys

LLAMA, SMS = AttnSpec(32, 8, 128), 132
ROOMY = torch.empty(256 << 20, dtype=torch.uint8)


def shared(max_q, max_kv, batch=1, spec=LLAMA, scratch=ROOMY):
    """Share the keys out as for widened keys, with one head in a tile."""
    return share_keys(spec, max_q * batch, max_q, max_kv, batch, 128, 1, 128, SMS, scratch)


def test_a_short_chunk_behind_a_long_context_fills_the_card():
    assert [shared(new, 8192 + new).count for new in (128, 256, 512)] == [4, 2, 1]


def test_half_a_wave_too_much_is_cut_where_the_context_is_long():
    assert shared(640, 2688).count == 1
    assert shared(640, 32768).count == 3  # 480 tiles of 528, not 160 of 264


def test_launches_that_fill_the_card_stay_whole():
    assert shared(128, 8192, batch=4).count == shared(8192, 8192).count == shared(128, 300).count == 1
    assert shared(128, 8192, spec=AttnSpec(64, 8, 64, window=128)).count == 1


def test_without_room_there_are_fewer_parts_or_one():
    state = 128 * 32 * 130 * 4
    assert [shared(128, 8320, scratch=ROOMY[: room * state]).count for room in (0, 1, 2, 3)] == [1, 1, 2, 3]
    assert shared(128, 8320, scratch=ROOMY[: 4 * state - 16]).count == 3


@given(st.integers(1, 3000), st.integers(0, 140_000), st.integers(1, 40), st.sampled_from([1, 4, 16]))
def test_parts_cover_all_keys_and_none_is_idle(max_q, before, batch, mb):
    max_kv, scratch = before + max_q, ROOMY[: mb << 20]
    parts = shared(max_q, max_kv, batch, scratch=scratch)
    assert parts.span % 128 == 0
    assert (parts.count - 1) * parts.span < max_kv <= parts.count * parts.span
    used = parts.count * max_q * batch * LLAMA.q_heads * (LLAMA.head_dim + 2)
    assert parts.count == 1 or used <= parts.states.numel()


@given(st.integers(1, 2000), st.integers(1, 140_000), st.sampled_from([132, 264, 1056]))
def test_parts_are_no_shorter_than_pays(tiles, keys, slots):
    parts = num_parts(tiles, keys, slots)
    assert 1 <= parts <= max(1, keys // LEAST)


@given(st.integers(1, 2000), st.integers(1, 140_000))
def test_where_any_batch_is_shared_out_one_query_is_too(tiles, keys):
    """What the engine's warm-up relies on, which computes one query behind the longest context."""
    assert num_parts(8, 140_000, 8 * SMS) > 1
    assert num_parts(tiles, keys, SMS) == 1 or num_parts(1, keys, 8 * SMS) > 1
