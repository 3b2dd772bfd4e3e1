"""Quantized Llama 4s: what each layout stands for is what both engines compute, its e4m3 kept as it is stored."""

import pytest
import torch

from bench.models.transformers_oracle import greedy as oracle_greedy
from checkpoint import open_checkpoint
from contracts.errors import ConfigError
from engine.cuda.model.matrices import keep
from engine.cuda.model.moe import ExpertWeights
from engine.cuda.model.number_formats import DEVICE_FORMATS
from engine.cuda.model.weight_loader import load_device_weights
from engine.cuda.runtime.pinned_copy import PinnedCopier
from engine.loader import load_engine
from engine.model_loader.checkpoint_weights import open_weights
from engine.model_loader.decoder_tensors import ModelTensors, layer_prefix, widened
from engine.model_loader.quantized_matrices import Fp8Matrix
from engine.model_loader.tensor_parallel_shards import Shard, ShardedWeights, shard_config
from kernels.cases import relative_error
from kernels.reference.quant import dequantize_rows
from tests.engine.device_engines import device_engine, logits_of
from tests.engine.driving import answers, greedy, random_prompts, settings
from tests.engine.quantized_models import LAYOUTS, LLAMA4_LAYOUTS, damage, save_quantized, save_quantized_llama4
from tests.engine.tiny_models import VOCAB, as_multimodal, change_config

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(VOCAB, (5, 64, 130))


@pytest.fixture(scope="module", params=sorted(LLAMA4_LAYOUTS))
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A folder in a layout, beside a vision tower, and the model that it stands for."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_quantized_llama4(folder, LLAMA4_LAYOUTS[request.param])
    as_multimodal(folder)
    return folder, model


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_greedy_answers_equal_those_of_the_widened_model(stored, device):
    folder, model = stored
    expected = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS]
    engine = load_engine(settings(model=str(folder))) if device == "cpu" else device_engine(folder)
    assert answers(engine, PROMPTS, greedy()) == expected


def test_what_a_gpu_reads_stands_for_the_same_matrices(stored, nothing_rounds):
    """Turned rows of q and k with their scales, and experts, among them."""
    checkpoint = open_checkpoint(str(stored[0]))
    source = open_weights(checkpoint, PinnedCopier(torch.device("cpu")).carry)
    config, silent = checkpoint.config, lambda *_: None
    weights = load_device_weights(config, source, DEVICE_FORMATS["float8"], 64, torch.device("cpu"), silent)
    tensors = ModelTensors(config, source, interleaved=False)
    for index, layer in enumerate(weights.layers):
        prefix = layer_prefix(index)
        shared = () if layer.shared is None else (layer.shared.gate_up, layer.shared.down)
        dense = () if layer.shared is not None else (layer.gate_up, layer.down)
        names = ("shared_gate_up", "shared_down") if shared else ("gate_up", "down")
        attention = (layer.qkv, layer.output)
        for matrix, name in zip((*attention, *shared, *dense), ("qkv", "output", *names), strict=True):
            if matrix.scale is None:
                assert index == 2 and name in ("qkv", "output")
                assert torch.equal(matrix.weight, tensors.fused(prefix, name).bfloat16())
            else:
                assert torch.equal(dequantize_rows(matrix.weight, matrix.scale), tensors.fused(prefix, name))
        if shared:
            assert isinstance(layer.mlp, ExpertWeights)
            of_all = (layer.mlp.gate_up, layer.mlp.gate_up_scale, layer.mlp.down, layer.mlp.down_scale)
            for expert, parts in zip(tensors.experts(prefix), zip(*of_all, strict=True), strict=True):
                assert torch.equal(dequantize_rows(*parts[:2]), widened(expert.gate_up))
                assert torch.equal(dequantize_rows(*parts[2:]), widened(expert.down))


@pytest.mark.parametrize("name", sorted(LLAMA4_LAYOUTS))
def test_rounded_activations_stay_near_the_widened_model(name, tmp_path, nothing_rounds):
    """With one expert, since a rounded row may go to another."""
    save_quantized_llama4(tmp_path, LLAMA4_LAYOUTS[name], num_local_experts=1)
    expected = logits_of(device_engine(tmp_path, "float32"), PROMPTS[:2])
    assert 1e-4 < relative_error(logits_of(device_engine(tmp_path, "float8"), PROMPTS[:2]), expected) < 0.3


@pytest.mark.parametrize("name", ["compressed-rows", "compressed-matrix"])
def test_experts_of_other_families_are_kept_too(name, tmp_path, nothing_rounds):
    """All of them chosen, since a rounded row may go to others."""
    save_quantized(tmp_path, LAYOUTS[name], "qwen3_moe", num_experts_per_tok=8)
    expected = logits_of(device_engine(tmp_path, "float32"), PROMPTS[:2])
    assert 1e-4 < relative_error(logits_of(device_engine(tmp_path, "float8"), PROMPTS[:2]), expected) < 0.3


LAYER = "model.layers.1.feed_forward."


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        (
            "llama4-modelopt",
            {f"{LAYER}experts.down_proj_weight_scale": torch.ones(3)},
            r"the scale of 'model.layers.1.mlp.experts.down_proj' is \[3\], its experts are \[8, 512, 256\]",
        ),
        (
            "llama4-modelopt",
            {f"{LAYER}experts.down_proj": torch.ones(8, 512, 256)},
            r"mlp.experts.down_proj' is torch.float32 beside a scale",
        ),
        (
            "llama4-modelopt",
            {f"{LAYER}experts.down_proj_weight_scale": None},
            r"mlp.experts.down_proj' is torch.float8_e4m3fn .*: its scales are missing",
        ),
        (
            "llama4-fbgemm",
            {f"{LAYER}experts.down_proj": torch.ones(8, 256, 512).to(torch.float8_e4m3fn)},
            r"the scale of 'model.layers.1.mlp.experts.down_proj' is \[8, 256, 1\], its experts are \[8, 256, 512\]",
        ),
        (
            "llama4-compressed",
            {f"{LAYER}experts.3.up_proj.weight_scale": None},
            r"mlp.experts.3.up_proj.weight' is torch.float8_e4m3fn .*: its scales are missing",
        ),
        (
            "llama4-compressed",
            {f"{LAYER}experts.3.up_proj.weight": torch.ones(256, 256).to(torch.float8_e4m3fn)},
            r"the scale of 'model.layers.1.mlp.experts.3.up_proj' is \[512, 1\], its weight \[256, 256\]",
        ),
    ],
)
def test_experts_that_do_not_fit_are_named(layout, changes, words, tmp_path):
    save_quantized_llama4(tmp_path, LLAMA4_LAYOUTS[layout])
    damage(tmp_path, changes)
    with pytest.raises(ConfigError, match=words):
        load_engine(settings(model=str(tmp_path)))


def test_the_configuration_names_modules_as_the_file_does(tmp_path):
    layout = LLAMA4_LAYOUTS["llama4-compressed"]
    save_quantized_llama4(tmp_path, layout)
    as_multimodal(tmp_path)
    left = "language_model.model.layers.1.feed_forward.shared_expert.down_proj"
    change_config(tmp_path, {"quantization_config": layout.config | {"ignore": [left]}})
    with pytest.raises(
        ConfigError, match=r"shared_expert.down_proj.weight' is .* or its config.json says that it is not"
    ):
        load_engine(settings(model=str(tmp_path)))


def test_parts_of_experts_are_parts_of_what_they_stand_for(stored):
    """On two GPUs: a slice of each gate, of each up, and of the columns of down."""
    checkpoint = open_checkpoint(str(stored[0]))
    source = open_weights(checkpoint, PinnedCopier(torch.device("cpu")).carry)
    whole = ModelTensors(checkpoint.config, source, interleaved=False)
    shards = [Shard(rank, 2) for rank in range(2)]
    parts = [
        ModelTensors(
            shard_config(checkpoint.config, shard), ShardedWeights(source, checkpoint.config, shard), interleaved=False
        )
        for shard in shards
    ]
    prefix = layer_prefix(1)
    for expert, *cut in zip(whole.experts(prefix), *(part.experts(prefix) for part in parts), strict=True):
        assert all(isinstance(matrix, Fp8Matrix) for part in cut for matrix in (part.gate_up, part.down))
        halves = zip(*(widened(part.gate_up).chunk(2) for part in cut), strict=True)
        assert torch.equal(torch.cat([torch.cat(half) for half in halves]), widened(expert.gate_up))
        assert torch.equal(torch.cat([widened(part.down) for part in cut], 1), widened(expert.down))
    for part in parts:
        kept = keep(part.stored(prefix, "qkv"), False, "qkv")
        assert kept is not None and kept.scale is not None
        assert torch.equal(dequantize_rows(kept.weight, kept.scale), part.fused(prefix, "qkv"))
