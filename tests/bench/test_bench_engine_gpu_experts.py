"""What bench.engine.moe compares with, and its comparison on the reference kernels."""

from dataclasses import replace

import pytest
import torch

from bench.engine.gpu import submit
from bench.engine.moe import SMALL, agreed, agreement_rows, flops_per_token, limit_ms, tokens_seen
from bench.models.random_model import GPT_OSS_20B, LLAMA4_MAVERICK, QWEN3_30B_A3B, RandomWeights, random_checkpoint
from engine.loader import load_device_engine
from engine.settings import EngineSettings
from models.config import Experts

TINY = replace(
    SMALL, vocab_size=300, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, max_model_len=512,
    experts=Experts(6, 2, 64, renormalize=True, dense_layers=(1,)), intermediate_size=192,
)  # fmt: skip


def test_the_byte_limit_counts_the_experts_that_are_touched():
    whole = limit_ms(QWEN3_30B_A3B, 10**6, 0, 1)
    one = limit_ms(QWEN3_30B_A3B, 1, 0, 1)
    # 48 layers of 128 or of 8 experts of 4.72 M, attention of 18.9 M and a router of 0.5 MB; a head of 622 MB.
    assert whole * 4.45e9 == pytest.approx(48 * (128 * 4.719e6 + 18.87e6 + 0.52e6) + 622e6, rel=1e-3)
    assert one * 4.45e9 == pytest.approx(48 * (8 * 4.719e6 + 18.87e6 + 0.52e6) + 622e6, rel=1e-3)
    assert flops_per_token(QWEN3_30B_A3B, 0) == pytest.approx(48 * 2 * (8 * 4.719e6 + 18.87e6 + 0.26e6), rel=1e-3)


def test_the_limits_of_llama4_count_dense_layers_and_the_shared_expert():
    config = replace(LLAMA4_MAVERICK, num_layers=4)
    # 4 layers of attention of 62.9 M, 2 of an MLP of 251.7 M, 2 of a shared and one other expert of 125.8 M each.
    multiplied = 4 * 62.91e6 + 2 * 251.66e6 + 2 * 2 * 125.83e6
    assert flops_per_token(config, 0) == pytest.approx(2 * (multiplied + 2 * 0.655e6), rel=1e-3)
    assert limit_ms(config, 1, 0, 1) * 4.45e9 == pytest.approx(multiplied + 2 * 1.311e6 + 2069e6, rel=1e-3)
    assert tokens_seen(config, 8192 + 100) == 3 * 100 + 8292


def test_agreement_ends_at_the_first_difference():
    assert agreed([1, 2, 3], [1, 2, 3]) == 3 and agreed([1, 2, 3], [1, 4, 3]) == 1


def test_the_reference_kernels_agree_with_the_cpu_engine():
    found = {(row.name, row.params["dtype"]): row.value for row in agreement_rows(torch.device("cpu"), TINY)}
    assert found["experts_tokens_alike", "float32"] == 1.0
    distances = [found["experts_logprob_distance_mean", dtype] for dtype in ("float32", "bfloat16", "float8")]
    assert distances[0] < 1e-5 < distances[1] < distances[2] < 0.5


@pytest.mark.parametrize("dtype", ["float8", "bfloat16"])
@pytest.mark.parametrize(
    ("whole", "experts"),
    [
        (GPT_OSS_20B, Experts(4, 2, 64, True, as_gpt_oss=True, is_mxfp4=True)),
        (LLAMA4_MAVERICK, Experts(4, 1, 64, True, dense_layers=(0,), as_llama4=True)),
    ],
    ids=["gpt-oss", "llama4"],
)
def test_one_of_random_weights_answers(whole, experts, dtype):
    config = replace(
        whole, vocab_size=300, hidden_size=128, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=32,
        max_model_len=256, experts=experts, intermediate_size=192,
    )  # fmt: skip
    settings = EngineSettings(dtype=dtype, kv_cache_nbytes=8 << 20, max_num_seqs=4, max_batched_tokens=128)
    checkpoint, device = random_checkpoint("tiny", config), torch.device("cpu")
    engine = load_device_engine(settings, checkpoint, lambda *_: None, RandomWeights(config, device), device)
    submit(engine, [200, 3], 5)
    tokens = []
    while engine.has_work():
        tokens += [sampled.token.token_id for sampled in engine.step().sampled]
    assert len(tokens) == 10 and all(0 <= token < config.vocab_size for token in tokens)


def test_windows_and_mxfp4_bound_what_is_read():
    assert tokens_seen(GPT_OSS_20B, 1000) == 12 * 1000 + 12 * 128
    assert limit_ms(GPT_OSS_20B, 10**9, 0, 1) * 4.45e9 == pytest.approx(
        24 * (32 * 24.88e6 * 17 / 32 + 26.54e6 + 0.18e6) + 1158e6, rel=1e-3
    )
