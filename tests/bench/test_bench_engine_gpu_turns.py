"""What bench.engine.chat_turns measures, where there is no GPU."""

import torch

from bench.engine.chat_turns import NUM_TURNS, first_token_ms, measure
from bench.engine.gpu import random_requests
from bench.models.model_folder import TINY
from bench.models.random_model import RandomWeights, random_checkpoint
from engine.loader import load_device_engine
from engine.settings import EngineSettings


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
