"""How large a KV cache is that no setting sizes."""

import pytest

from contracts.errors import ConfigError
from contracts.layout import KVGroup, KVLayout
from engine.cache.sizing import DEFAULT_TOKENS, CacheSize, cache_nbytes, cache_size, log_capacity
from engine.loader import load_engine
from engine.settings import EngineSettings
from tests.e2e.tiny import save_tiny

GIB = 1 << 30
SMALL = KVLayout.uniform(model="m", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
LARGE = KVLayout.uniform(model="m", num_layers=32, num_kv_heads=32, head_dim=128, block_size=16, dtype="float32")


@pytest.mark.parametrize(
    ("layout", "max_model_len", "available", "expected"),
    [
        (SMALL, None, 64 * GIB, 1024 * SMALL.block_nbytes),  # what a trial needs, however much is free
        (SMALL, 40000, 64 * GIB, 2500 * SMALL.block_nbytes),  # one context of the length that was asked for
        (SMALL, 1000, 64 * GIB, 1024 * SMALL.block_nbytes),
        (SMALL, None, 2 * GIB, int(2 * GIB * 0.15)),  # a share of little
        (SMALL, None, 1 * GIB, 256 << 20),
        (LARGE, None, 64 * GIB, 2 * GIB),
    ],
)
def test_a_cache_that_no_setting_sizes_is_for_a_trial(layout, max_model_len, available, expected):
    assert cache_nbytes(EngineSettings(max_model_len=max_model_len), layout, available) == expected


def test_a_setting_sizes_it():
    assert cache_nbytes(EngineSettings(kv_cache_nbytes=3 * GIB), SMALL, 4 * GIB) == 3 * GIB
    with pytest.raises(ConfigError, match="TANDEM_KV_CACHE_MIB"):
        cache_nbytes(EngineSettings(kv_cache_nbytes=3 * GIB), SMALL, 2 * GIB)


def test_the_log_says_what_the_cache_takes_and_what_changes_it(tmp_path, caplog):
    caplog.set_level("INFO")
    engine = load_engine(EngineSettings(model=str(save_tiny(tmp_path)), dtype="float32", num_threads=1))
    assert engine.capacity_tokens == DEFAULT_TOKENS
    nbytes = DEFAULT_TOKENS * engine.layout.block_nbytes // engine.layout.block_size
    (told,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("the KV cache")]
    assert told.startswith(f"the KV cache holds 16384 tokens in {nbytes >> 20} MiB; TANDEM_KV_CACHE_MIB ")


FULL, SHORT = (
    KVGroup(kind=kind, span=span, layers=layers, num_kv_heads=8, head_dim=64, block_size=16, dtype="bfloat16")
    for kind, span, layers in (("full", 0, tuple(range(1, 24, 2))), ("window", 128, tuple(range(0, 24, 2))))
)
HALF_WINDOWED = KVLayout(model="m", block_size=16, groups=(FULL, SHORT))
NEED, SLACK = 9, 64 + 1


@pytest.mark.parametrize("mib", [2, 24, 64, 200, 512, 4096])
@pytest.mark.parametrize("draft_nbytes", [0, 4096])
def test_windows_have_what_sequences_need_and_the_rest_is_for_whole_contexts(mib, draft_nbytes):
    nbytes, settings = mib << 20, EngineSettings()
    size = cache_size(nbytes, HALF_WINDOWED, settings, 131072, draft_nbytes)
    whole = nbytes // (HALF_WINDOWED.block_nbytes + draft_nbytes)
    (num_pages,) = size.num_pages
    used = size.num_blocks * (HALF_WINDOWED.group_nbytes(0) + draft_nbytes)
    assert size.nbytes == used + num_pages * HALF_WINDOWED.group_nbytes(1) <= nbytes
    if mib <= 64:  # the prompt of a step takes more than half of it
        assert num_pages == size.num_blocks == whole
    else:
        assert 2 * NEED + SLACK <= num_pages < whole < size.num_blocks
        assert num_pages <= 2 * NEED * settings.max_num_seqs + SLACK
    assert mib < 4096 or size.num_blocks > 1.6 * whole


def test_blocks_are_whole_where_settings_say_so_or_layers_are_alike():
    settings = EngineSettings(keeps_whole_blocks=True)
    size = cache_size(512 << 20, HALF_WINDOWED, settings, 131072)
    assert size.num_pages == (size.num_blocks,) and size.num_blocks == (512 << 20) // HALF_WINDOWED.block_nbytes
    assert cache_size(3 * SMALL.block_nbytes + 1, SMALL, settings, 100) == CacheSize(3, (), 3 * SMALL.block_nbytes)


def test_blocks_without_a_page_of_full_attention_are_as_many_as_contexts_have():
    layout = HALF_WINDOWED.of_groups([1])
    size = cache_size(1000 * layout.block_nbytes, layout, EngineSettings(), 32768)
    assert size == CacheSize(1000 // NEED * 2048, (1000,), 1000 * layout.block_nbytes)
    assert cache_size(60 * layout.block_nbytes, layout, EngineSettings(), 32768).num_blocks == 60


def test_what_windows_hold_is_logged(caplog):
    caplog.set_level("INFO")
    log_capacity(HALF_WINDOWED, CacheSize(1000, (200,), 1 << 20))
    assert "of 12 layers, which see a window of 128 tokens, it holds 3200 of these tokens" in caplog.text
    caplog.clear()
    log_capacity(HALF_WINDOWED, CacheSize(1000, (1000,), 1 << 20))
    assert "window" not in caplog.text
