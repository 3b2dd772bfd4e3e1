"""DeepSeek's attention over latents and its mixtures, beside what every family's tests compare with transformers."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3ForCausalLM, PreTrainedModel

from bench.models.transformers_oracle import greedy as oracle_greedy
from checkpoint.huggingface.model_config import model_config
from contracts.errors import ConfigError
from engine.cache.sizing import one_group_layout
from engine.loader import load_engine
from engine.model_loader.tensor_parallel_shards import Shard, kv_shard
from tests.engine.driving import answers, drain, greedy, random_prompts, request, settings
from tests.engine.quantized_models import Packed, block_config, fp8_blocks, packed
from tests.engine.tiny_models import VOCAB, as_multimodal, change_config, save_tiny
from tests.models.test_public_configs import RELEASED

PROMPTS = random_prompts(VOCAB, (5, 70))
V3, K2_5 = (
    next(released["config"] for released in RELEASED if released["model"] == name)
    for name in ("deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2.5")
)
V2 = {**V3, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": "greedy", "scoring_func": "softmax"}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": 40, "n_group": None, "topk_group": None}),
        ("deepseek_v3", {"rope_interleave": False, "n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"norm_topk_prob": False, "q_lora_rank": None, "first_k_dense_replace": 0}),
    ],
)
def test_variants_are_those_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = save_tiny(tmp_path, family, **changes)
    expected = [oracle_greedy(model, prompt, 64) for prompt in PROMPTS]
    assert answers(load_engine(settings(model=str(tmp_path))), PROMPTS, greedy(64)) == expected


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numbers_depend_on_neither_the_batch_nor_the_chunks(dtype: str, tmp_path: Path) -> None:
    """To the bit: of rows of prompts, for which keys and values are made, and of answers, for which none are."""
    save_tiny(tmp_path, "deepseek_v3")
    prompts = random_prompts(VOCAB, (5, 70, 300))
    chosen = {"model": str(tmp_path), "dtype": dtype, "num_threads": 2}

    def told(parts: list[list[list[int]]], **changes: Any) -> list[list[tuple[int, float | None]]]:
        engine, found = load_engine(settings(**chosen, **changes)), list[list[tuple[int, float | None]]]()
        for part in parts:
            for index, prompt in enumerate(part):
                engine.submit(request(str(index), prompt, greedy(8, logprobs=0)))
            sampled = [one for output in drain(engine) for one in output.sampled]
            for index in range(len(part)):
                tokens = [one.token for one in sampled if one.request_id == str(index)]
                found.append([(token.token_id, token.logprob) for token in tokens])
        return found

    alone = told([[prompt] for prompt in prompts])
    assert told([prompts]) == alone
    assert told([prompts, prompts], max_batched_tokens=48, max_mixed_tokens=16) == alone * 2


def save_packed(folder: Path, pack: Callable[[Tensor], Packed], part: str, config: dict[str, Any]) -> PreTrainedModel:
    """Quantize the matrices of a saved model that have `part` in their names; return what it then stands for."""
    tensors, plain = load_file(folder / "model.safetensors"), folder / "plain"
    dense = dict(tensors)
    for name in [name for name in tensors if part in name]:
        packed, dense[name] = pack(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{key}": value.contiguous() for key, value in packed.items()}
    plain.mkdir()
    (plain / "config.json").write_text((folder / "config.json").read_text())
    save_file(dense, plain / "model.safetensors", {"format": "pt"})
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, {"quantization_config": config})
    return DeepseekV3ForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def test_blocks_of_fp8_are_widened_those_of_the_latents_too(tmp_path: Path) -> None:
    """The last block of rows of kv_a_proj_with_mqa is not a whole one, as in the released checkpoints."""
    widths = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "v_head_dim": 64}
    save_tiny(tmp_path, "deepseek_v3", **widths, q_lora_rank=128, kv_lora_rank=128, num_hidden_layers=2)
    widened = save_packed(tmp_path, fp8_blocks, "_proj", block_config())
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 1)
    expected = [oracle_greedy(widened, prompt, 12) for prompt in PROMPTS]
    assert answers(load_engine(settings(model=str(tmp_path))), PROMPTS, greedy()) == expected


def test_the_text_part_of_kimi_k2_5_is_served_with_its_experts_in_int4(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "deepseek_v3", moe_intermediate_size=64, num_hidden_layers=2)
    config = K2_5["text_config"]["quantization_config"]
    widened = save_packed(tmp_path, lambda weight: packed(weight, group=32), ".experts.", config)
    as_multimodal(tmp_path, K2_5["architectures"][0], "kimi_k25", "vision_tower.encoder", "mm_projector.proj.0")
    whole = json.loads((tmp_path / "config.json").read_text())
    whole["text_config"]["quantization_config"] = whole.pop("quantization_config")  # as it is released
    (tmp_path / "config.json").write_text(json.dumps(whole))
    expected = [oracle_greedy(widened, prompt, 12) for prompt in PROMPTS]
    with caplog.at_level(logging.INFO):
        assert answers(load_engine(settings(model=str(tmp_path))), PROMPTS, greedy()) == expected
    assert "2 tensors of the vision tower are not read" in caplog.text


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path, "deepseek_v3", num_hidden_layers=2)
    before = answers(load_engine(settings(model=str(tmp_path))), PROMPTS, greedy())
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.2.eh_proj.weight": torch.ones(96, 192)}, file)
    with caplog.at_level(logging.INFO):
        assert answers(load_engine(settings(model=str(tmp_path))), PROMPTS, greedy()) == before
    assert "layers for multi-token prediction, 2, draft with --speculate mtp" in caplog.text
    change_config(tmp_path, {"num_nextn_predict_layers": 0})
    with pytest.raises(ConfigError, match="its weights have 3 layers, its configuration says 2"):
        load_engine(settings(model=str(tmp_path)))


def test_a_latent_is_all_that_is_kept_of_a_token() -> None:
    config = model_config(V3, "here")
    layout = one_group_layout(config, 16, "bfloat16")
    assert layout.block_nbytes == 16 * config.num_layers * config.kv_width * 2 == 16 * 61 * (512 + 64) * 2
    assert [kv_shard(config, Shard(rank, 4)) for rank in (0, 3)] == [Shard(0, 1)] * 2, "each of four GPUs has a copy"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**V3, "num_key_value_heads": 1}, "num_key_value_heads is 1; as many as num_attention_heads"),
        ({**V3, "topk_method": "greedy"}, "topk_method 'greedy' is not supported of DeepSeek-V3; only 'noaux_tc'"),
        ({name: V3[name] for name in V3 if name != "n_shared_experts"}, "lacks 'n_shared_experts'"),
        ({**V3, "topk_method": "best"}, "topk_method 'best' is not supported of DeepSeek-V3"),
        ({**V3, "scoring_func": "softmax"}, "scoring_func 'softmax' is not supported with topk_method 'noaux_tc'"),
        ({**V2, "norm_topk_prob": True}, "norm_topk_prob is true; with topk_method 'greedy' only false"),
        ({**V3, "moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
        ({**V3, "n_group": 7}, "8 of 256 experts in 4 of 7 groups .*, n_group.* are not supported"),
        ({**V3, "qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; an even number"),
        ({**V3, "kv_lora_rank": 0.5}, "kv_lora_rank is 0.5; a whole number"),
        ({**V3, "kv_lora_rank": 511}, "kv_lora_rank is 511; an even number"),
        ({**V3, "routed_scaling_factor": 0}, "routed_scaling_factor is 0.0; a number above 0"),
        ({key: V3[key] for key in V3 if key != "v_head_dim"}, "lacks 'v_head_dim'"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_its_field(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_config(config, "here")


def test_the_folder_of_an_older_release_may_name_the_model_type_alone(tmp_path: Path) -> None:
    config = {key: value for key, value in V2.items() if key != "architectures"} | {"norm_topk_prob": False}
    found = model_config(json.loads(json.dumps({**config, "model_type": "deepseek_v2"})), "here")
    assert found == model_config({**V2, "norm_topk_prob": False}, "here")
