"""How large a KV cache is that no setting sizes."""

import pytest

from contracts.errors import ConfigError
from contracts.layout import KVLayout
from engine.cache.sizing import DEFAULT_TOKENS, cache_nbytes
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
