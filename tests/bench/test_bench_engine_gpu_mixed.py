"""What bench.engine.mixed_batches measures, where there is no GPU."""

import torch

from bench.engine import mixed_batches as engine_gpu_mixed
from bench.models.model_folder import TINY
from bench.models.random_model import RandomWeights, random_checkpoint
from engine.loader import load_device_engine
from engine.settings import EngineSettings


def test_a_prompt_is_computed_beside_answers_so_much_a_step(monkeypatch):
    monkeypatch.setattr(engine_gpu_mixed, "LENGTH", 256)
    monkeypatch.setattr(engine_gpu_mixed, "PROMPT", 8)
    settings = EngineSettings(
        dtype="float32", kv_cache_nbytes=8 << 20, max_num_seqs=4, max_mixed_tokens=64, prefix_cache=False
    )
    device = torch.device("cpu")
    engine = load_device_engine(
        settings, random_checkpoint("tiny", TINY), lambda *_: None, RandomWeights(TINY, device), device
    )
    *found, scored, _ = measured = engine_gpu_mixed.measure(engine, 64, 2)
    rows = {row.name: row for row in [*found, *measured[-1:]]}
    assert scored.name == "engine_mixed_gap" and scored.params["asks for"] == "prompt_logprobs"
    gap, longest = rows["engine_mixed_gap"], rows["engine_mixed_gap_longest"]
    assert gap.limit and 0 < gap.limit < gap.value <= longest.value
    assert rows["engine_mixed_prompt"].value > 0 and rows["engine_mixed_host_work"].value > 0
    assert not engine.has_work()
    assert engine.stats().num_prefill_tokens == 2 * 8 + 5 * 256
