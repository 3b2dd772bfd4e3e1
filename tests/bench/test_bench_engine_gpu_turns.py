"""What bench.engine_gpu_turns measures, where there is no GPU."""

from dataclasses import replace

import torch

from bench.engine_gpu import random_requests
from bench.engine_gpu_turns import NUM_TURNS, first_token_ms, measure
from bench.random_model import LLAMA_8B, RandomWeights, random_checkpoint
from engine.cuda.load import load_device_engine
from engine.messages import EngineSettings

TINY = replace(
    LLAMA_8B, vocab_size=400, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, max_model_len=1024,
)  # fmt: skip


def test_of_each_turn_only_what_is_new_is_computed():
    settings, device = EngineSettings(dtype="float32", kv_cache_nbytes=8 << 20), torch.device("cpu")
    engine = load_device_engine(
        settings, random_checkpoint("tiny", TINY), lambda *_: None, RandomWeights(TINY, device), device
    )
    (earlier,) = random_requests(engine, [256], 1)
    first_token_ms(engine, earlier)
    row = measure(engine, earlier, 70)
    assert row.name == "engine_turn" and row.params == {"cached": 256, "new": 70}
    assert row.limit and 0 < row.limit < row.value
    assert engine.stats().num_prefill_tokens == 256 + NUM_TURNS * 70
