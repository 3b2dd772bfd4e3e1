"""What weights take of a GPU's memory is known before they are read: never more than they do, and not much less."""

from dataclasses import replace

import pytest
import torch

from bench.models.random_model import (
    GPT_OSS_20B,
    LLAMA4_MAVERICK,
    LLAMA_8B,
    LLAMA_70B,
    QWEN3_30B_A3B,
    random_checkpoint,
)
from checkpoint import open_checkpoint
from engine.cuda.model.format_choice import DEVICE_DTYPES, kept_as
from engine.cuda.model.memory_footprint import least_weights_nbytes
from engine.cuda.model.number_formats import DEVICE_FORMATS
from engine.cuda.model.weight_loader import load_device_weights
from engine.cuda.runtime.pinned_copy import PinnedCopier
from engine.model_loader.checkpoint_weights import open_weights
from engine.model_loader.tensor_parallel_shards import Shard, ShardedWeights, shard_config
from tests.engine.device_engines import tensors_of
from tests.engine.quantized_models import LAYOUTS, save_quantized
from tests.engine.tiny_models import DEVICE_FAMILIES, save_mxfp4, save_tiny

pytestmark = pytest.mark.slow

PLAIN = [dtype for dtype in DEVICE_DTYPES if dtype != "int4"]
GIB = 2**30


def held_nbytes(folder, dtype: str, num_gpus: int) -> int:
    """Return the bytes of the tensors that a load makes, on the fullest GPU.

    The table of rotary angles is not one of the weights.
    """
    checkpoint, device = open_checkpoint(str(folder)), torch.device("cpu")
    source, found = open_weights(checkpoint, PinnedCopier(device).carry), []
    for rank in range(num_gpus):
        shard = Shard(rank, num_gpus)
        part = source if num_gpus == 1 else ShardedWeights(source, checkpoint.config, shard)
        config = shard_config(checkpoint.config, shard)
        weights = load_device_weights(config, part, DEVICE_FORMATS[dtype], 64, device, lambda *_: None, shard)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(weights)}
        found.append(sum(storages.values()) - weights.cos_sin.untyped_storage().nbytes())
    return max(found)


def test_every_format_is_known():
    assert tuple(DEVICE_FORMATS) == DEVICE_DTYPES


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("family", DEVICE_FAMILIES)
def test_weights_take_at_least_what_was_told(family, dtype, tmp_path):
    save_tiny(tmp_path, family)
    check(tmp_path, dtype)


@pytest.mark.parametrize("dtype", PLAIN)
def test_mxfp4_is_told_as_it_is_kept(dtype, tmp_path):
    save_mxfp4(tmp_path, save_tiny(tmp_path, "gpt_oss", hidden_size=128, intermediate_size=128))
    check(tmp_path, dtype)


@pytest.mark.parametrize("name", LAYOUTS)
def test_quantized_weights_take_at_least_what_was_told(name, tmp_path):
    save_quantized(tmp_path, LAYOUTS[name])
    for dtype in ("bfloat16", kept_as(open_checkpoint(str(tmp_path)))[0]):
        check(tmp_path, dtype, least=0.5, counts=(1,))  # some have scales that two would share


def check(folder, dtype: str, least: float = 0.6, counts: tuple[int, ...] = (1, 2)) -> None:
    """Norms, biases and scales weigh much in models as small as these."""
    checkpoint = open_checkpoint(str(folder))
    for num_gpus in counts:
        held, told = held_nbytes(folder, dtype, num_gpus), least_weights_nbytes(checkpoint, dtype, num_gpus)
        assert least * held < told <= held, (num_gpus, told, held)


@pytest.mark.parametrize(
    ("config", "dtype", "gib"),
    [
        (LLAMA_8B, "bfloat16", 14.96),  # 8.03e9 parameters
        (LLAMA_8B, "float8", 8.46),
        (LLAMA_70B, "bfloat16", 131.4),  # 70.6e9
        (QWEN3_30B_A3B, "bfloat16", 56.9),  # 30.5e9
        (GPT_OSS_20B, "bfloat16", 12.7),  # its files: 12.8
        (LLAMA4_MAVERICK, "bfloat16", 746.2),  # 400.7e9
    ],
)
def test_models_that_are_known_take_what_their_makers_say(config, dtype, gib):
    assert least_weights_nbytes(random_checkpoint("random", config), dtype) / GIB == pytest.approx(gib, rel=0.01)


def test_gpus_share_all_but_the_embedding():
    checkpoint = random_checkpoint("random", LLAMA_70B)
    table = 2 * LLAMA_70B.vocab_size * LLAMA_70B.hidden_size
    alone, shared = (least_weights_nbytes(checkpoint, "bfloat16", count) for count in (1, 8))
    assert shared == table + (alone - table) // 8
    tied = replace(checkpoint, config=replace(LLAMA_70B, tied_embeddings=True))
    assert least_weights_nbytes(tied, "bfloat16") == alone - table
