"""Quantized checkpoints: what they stand for is what both engines compute, and what is not supported is named."""

import json
from dataclasses import replace

import pytest
import torch

from bench.models.transformers_oracle import greedy as oracle_greedy
from checkpoint import open_checkpoint
from checkpoint.quantization import read_quantization
from contracts.errors import ConfigError
from engine.cuda.model.format_choice import kept_as, resolve_device_dtype
from engine.cuda.model.fused_decode import FusedDecode
from engine.cuda.model.linear import QuantizedLinear, Scaled
from engine.cuda.model.matrices import Matrix, keep
from engine.cuda.runner import DeviceRunner
from engine.cuda.runtime.pinned_copy import PinnedCopier
from engine.loader import load_engine
from engine.model_loader.checkpoint_weights import open_weights
from engine.model_loader.decoder_tensors import ModelTensors, layer_prefix
from kernels import catalog
from kernels.caps import Caps
from kernels.cases import relative_error
from kernels.reference.gemm import dequantize_w4
from kernels.reference.quant import dequantize_blocks, dequantize_rows
from kernels.registry import Registry
from kernels.specs import GemmSpec
from tests.engine.device_engines import device_engine, logits_of
from tests.engine.driving import answers, greedy, random_prompts, settings
from tests.engine.quantized_models import (
    FP8_KV,
    INT8_TOKEN,
    LAYOUTS,
    STATIC,
    TOKEN,
    block_config,
    compressed,
    compressed_integers,
    damage,
    fp8_blocks,
    gptq_config,
    save_quantized,
)
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(VOCAB, (5, 17, 64, 130))
FLOATS = [name for name in LAYOUTS if not name.startswith(("gptq", "awq", "packed", "int8", "nvfp4"))]
WIDENED = (
    "gptq-32",
    "gptq-act-order",
    "packed-act-order",
    "gptq-8",
    "packed-8",
    "int8",
    "int8-asymmetric",
    "nvfp4",
    "nvfp4-modelopt",
)
WHY = r"group_size is 32|desc_act is true|no kernel here multiplies (INT8|NVFP4)"
BOUNDS = {"float8": 0.3, "int4": 0.04}
"""The distance of logits from the widened model's; test_device_engine allows e4m3 and bf16 activations the same."""


def kept_dtype(name: str) -> str:
    return "float8" if name in FLOATS else "int4"


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A layout's name, a folder in it, and the model that it stands for."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, save_quantized(folder, LAYOUTS[request.param])


def test_a_matrix_is_widened_to_what_it_stands_for(stored):
    _, folder, model = stored
    source = open_weights(open_checkpoint(str(folder)))
    for name, expected in model.state_dict().items():
        assert torch.equal(source.tensor(name), expected), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_greedy_answers_equal_those_of_the_widened_model(stored, device):
    name, folder, model = stored
    if device == "cuda" and name in ("packed-act-order", "packed-8", "int8-asymmetric", "nvfp4"):
        pytest.skip("it is widened by the code that the CPU widens it by, and another such layout is answered here")
    expected = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS]
    engine = load_engine(settings(model=str(folder))) if device == "cpu" else device_engine(folder)
    assert answers(engine, PROMPTS, greedy()) == expected


def test_matrices_stay_as_they_are_stored(stored, nothing_rounds):
    name, folder, _ = stored
    dtype = kept_dtype(name)
    if name in WIDENED:
        with pytest.raises(ConfigError, match=rf"({WHY}).*: use bfloat16"):
            device_engine(folder, dtype)
        return
    expected = logits_of(device_engine(folder, "float32"), PROMPTS[:2])
    error = relative_error(logits_of(device_engine(folder, dtype), PROMPTS[:2]), expected)
    assert 1e-4 < error < BOUNDS[dtype]


def widened(matrix: Matrix) -> torch.Tensor:
    """Return the weights by the reference's formulas for what the kernels read."""
    assert matrix.scale is not None
    if matrix.weight.dtype is E4M3:
        return (dequantize_rows if matrix.scale.dim() == 1 else dequantize_blocks)(matrix.weight, matrix.scale)
    return dequantize_w4(matrix.weight, matrix.scale)


def test_what_the_kernels_read_stands_for_the_same_matrix(stored):
    name, folder, _ = stored
    checkpoint = open_checkpoint(str(folder))
    tensors = ModelTensors(
        checkpoint.config, open_weights(checkpoint, PinnedCopier(torch.device("cpu")).carry), interleaved=False
    )
    for layer in range(0 if name in WIDENED else 3):
        prefix = layer_prefix(layer)
        for part in ("qkv", "output", "gate_up", "down"):
            kept = keep(tensors.stored(prefix, part), kept_dtype(name) == "int4", part)
            assert kept is not None and torch.equal(widened(kept), tensors.fused(prefix, part))


@pytest.mark.parametrize("count", [1, 4, 63, 64, 67, 130])
def test_block_products_are_split_where_cublas_wants_rows_by_fours(count):
    packed, dense = fp8_blocks(torch.randn(256, 384))
    matrix = Matrix(packed["weight"], packed["weight_scale_inv"])
    asked: list[GemmSpec] = []

    class Asked(Registry):
        def get(self, op, spec):
            if isinstance(spec, GemmSpec):
                asked.append(spec)
            return super().get(op, spec)

    products = QuantizedLinear(Asked(catalog.IMPLS, Caps("cpu")), [matrix], 130, torch.device("cpu"))
    rows, out = torch.randn(count, 384), torch.full((count, 256), torch.nan)
    products(matrix, Scaled(rows, rows), out)
    assert relative_error(out, rows @ dense.t()) < 0.04
    by_fours = count % 4 == 0 or count >= 128
    assert [spec.skinny for spec in asked] == [False] * by_fours + [True] * (count % 4 != 0)


@pytest.mark.parametrize("name", ["compressed-rows-only", "compressed-blocks-only"])
def test_weights_alone_in_fp8_are_multiplied_by_activations_as_they_are(name, tmp_path, monkeypatch):
    save_quantized(tmp_path, LAYOUTS[name])
    expected = logits_of(device_engine(tmp_path, "float32"), PROMPTS[:2])
    kept = relative_error(logits_of(device_engine(tmp_path, "float8"), PROMPTS[:2]), expected)
    monkeypatch.setattr("engine.cuda.model.weight_loader.keep", lambda stored, int4, name, _: keep(stored, int4, name))
    rounded = relative_error(logits_of(device_engine(tmp_path, "float8"), PROMPTS[:2]), expected)
    assert kept < 0.8 * rounded


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_quantized_head_that_is_stored_is_the_one_that_answers(name, device, tmp_path):
    """Whatever config.json says of the embedding, as of plain ones."""
    model = save_quantized(tmp_path, LAYOUTS[name], plain=())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    expected = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS[:2]]
    engine = load_engine(settings(model=str(tmp_path))) if device == "cpu" else device_engine(tmp_path)
    assert answers(engine, PROMPTS[:2], greedy()) == expected


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["compressed-rows", "compressed-blocks-only", "deepseek", "awq"])
def test_biases_and_head_norms_go_with_every_layout(name, family, tmp_path, nothing_rounds):
    model = save_quantized(tmp_path, LAYOUTS[name], family)
    expected = logits_of(device_engine(tmp_path, "float32"), PROMPTS[:2])
    found = logits_of(device_engine(tmp_path, kept_dtype(name)), PROMPTS[:2])
    assert 1e-4 < relative_error(found, expected) < BOUNDS[kept_dtype(name)]
    tokens = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS[:2]]
    assert answers(load_engine(settings(model=str(tmp_path))), PROMPTS[:2], greedy()) == tokens


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS["compressed-matrix"],
        LAYOUTS["modelopt"],
        replace(LAYOUTS["autofp8"], kv_names=("k_proj.output_scale", "v_proj.output_scale")),
    ],
    ids=["compressed-matrix", "modelopt", "quark"],
)
def test_scales_of_kv_and_activations_come_from_the_checkpoint(layout, tmp_path):
    save_quantized(tmp_path, layout)
    engine = device_engine(tmp_path, "float8")
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    layers = [runner.launcher.cache.layer(index) for index in range(3)]
    assert [(layer.k_scale, layer.v_scale) for layer in layers] == [(0.25, 0.5), (0.5, 1.0), (0.75, 1.5)]
    fused = runner.launcher.steps._make.__self__  # type: ignore[attr-defined]
    assert isinstance(fused, FusedDecode)
    assert torch.equal(fused.scales, torch.full_like(fused.scales, 0.05))


@pytest.mark.parametrize("name", ["compressed-rows", "deepseek"])
def test_a_start_calibrates_by_as_few_rows_as_a_batch_may_have(name, tmp_path):
    save_quantized(tmp_path, LAYOUTS[name])
    few = logits_of(device_engine(tmp_path, "float8", max_batched_tokens=64), [PROMPTS[0]])
    assert relative_error(few, logits_of(device_engine(tmp_path, "float8"), [PROMPTS[0]])) < BOUNDS["float8"]


@pytest.mark.parametrize("name", ["compressed-rows", "deepseek", "gptq"])
@pytest.mark.parametrize(
    "plain",
    [("lm_head", "down_proj"), ("lm_head", "self_attn"), ("lm_head", "layers.1."), ("lm_head", "v_proj")],
    ids=lambda plain: plain[1],
)
def test_what_the_checkpoint_leaves_plain_stays_so(name, plain, tmp_path, nothing_rounds):
    model = save_quantized(tmp_path, LAYOUTS[name], plain=plain)
    expected = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS[:2]]
    assert answers(load_engine(settings(model=str(tmp_path))), PROMPTS[:2], greedy()) == expected
    found = logits_of(device_engine(tmp_path, kept_dtype(name)), PROMPTS[:2])
    reference = logits_of(device_engine(tmp_path, "float32"), PROMPTS[:2])
    assert 1e-4 < relative_error(found, reference) < BOUNDS[kept_dtype(name)]


@pytest.mark.parametrize("name", ["compressed-rows", "deepseek", "awq"])
def test_an_output_head_may_be_quantized_too(name, tmp_path, nothing_rounds):
    layout = LAYOUTS[name]
    model = save_quantized(tmp_path, layout, plain=("none",), vocab_size=384)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('["lm_head"]', "[]"))
    expected = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS[:2]]
    assert answers(load_engine(settings(model=str(tmp_path))), PROMPTS[:2], greedy()) == expected
    found = logits_of(device_engine(tmp_path, kept_dtype(name)), PROMPTS[:2])
    reference = logits_of(device_engine(tmp_path, "float32"), PROMPTS[:2])
    assert 1e-4 < relative_error(found, reference) < BOUNDS[kept_dtype(name)]


Q = "model.layers.0.self_attn.q_proj"
E4M3 = torch.float8_e4m3fn


def test_tensors_that_do_not_fit_are_named(tmp_path):
    save_quantized(tmp_path, LAYOUTS["compressed-rows"])
    damages: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({f"{Q}.weight_scale": None}, rf"'{Q}.weight' is torch.float8_e4m3fn .*: its scales are missing"),
        ({f"{Q}.weight_scale": torch.ones(7)}, rf"the scale of '{Q}' is \[7\], its weight \[256, 256\]: not FP8 with"),
        (
            {f"{Q}.weight_scale": torch.ones(1), f"{Q}.weight": torch.ones(256, 256)},
            rf"'{Q}.weight' is torch.float32 beside a scale; only float8_e4m3fn",
        ),
        (
            {f"{Q}.weight": torch.ones(128, 256).to(E4M3)},
            rf"the tensor '{Q}.weight' is \[128, 256\]; its configuration says \[256, 256\]",
        ),
    ]
    for changes, words in damages:
        damage(tmp_path, changes)
        with pytest.raises(ConfigError, match=words):
            load_engine(settings(model=str(tmp_path)))


def test_int4_tensors_that_do_not_fit_are_named(tmp_path):
    save_quantized(tmp_path, LAYOUTS["gptq"])
    damage(tmp_path, {f"{Q}.qzeros": None})
    with pytest.raises(ConfigError, match=rf"lacks '{Q}.qzeros'"):
        load_engine(settings(model=str(tmp_path)))
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"group_size": 128', '"group_size": 64'))
    damage(tmp_path, {f"{Q}.qzeros": torch.zeros(2, 32, dtype=torch.int32)})
    with pytest.raises(ConfigError, match=r"self_attn\.[qkvo]_proj' has 2 scales in 256 columns; group_size is 64"):
        load_engine(settings(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("packed", {"weight_scale": None}, rf"lacks '{Q}.weight_scale'"),
        ("packed", {"weight_shape": torch.tensor([256, 248])}, r"is \[256, 32\]; its weight_shape says \[256, 248\]"),
        ("packed-asymmetric", {"weight_zero_point": None}, rf"lacks '{Q}.weight_zero_point'"),
        ("int8", {"weight_scale": torch.ones(7)}, rf"'{Q}.weight' is torch.int8 .* its scale \[7\]: not INT8 with"),
        ("int8", {"weight_scale": None}, rf"'{Q}.weight' is torch.int8 .*: its scales are missing"),
        ("nvfp4", {"weight_global_scale": None}, rf"lacks '{Q}.weight_global_scale'"),
        ("nvfp4-modelopt", {"weight_scale_2": None}, rf"lacks '{Q}.weight_scale_2'"),
        ("nvfp4-modelopt", {"weight_scale": torch.ones(256, 8)}, rf"the scale of '{Q}' is .*: not NVFP4"),
        ("nvfp4-modelopt", {"pre_quant_scale": torch.ones(256)}, rf"'{Q}.pre_quant_scale' scales activations"),
    ],
)
def test_tensors_of_other_layouts_that_do_not_fit_are_named(name, changes, words, tmp_path):
    save_quantized(tmp_path, LAYOUTS[name])
    damage(tmp_path, {f"{Q}.{key}": tensor for key, tensor in changes.items()})
    with pytest.raises(ConfigError, match=words):
        load_engine(settings(model=str(tmp_path)))


@pytest.mark.parametrize("name", ["packed", "int8", "nvfp4-modelopt", "gptq-8"])
def test_experts_in_every_layout_are_widened(name, tmp_path):
    model = save_quantized(tmp_path, LAYOUTS[name], "qwen3_moe", moe_intermediate_size=128)
    expected = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS[:2]]
    assert answers(load_engine(settings(model=str(tmp_path))), PROMPTS[:2], greedy()) == expected
    assert answers(device_engine(tmp_path), PROMPTS[:2], greedy()) == expected


def test_columns_in_any_order_are_found_whatever_the_configuration_says(tmp_path):
    model = save_quantized(tmp_path, replace(LAYOUTS["gptq-act-order"], config=gptq_config(desc_act=False)))
    expected = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS[:2]]
    assert answers(load_engine(settings(model=str(tmp_path))), PROMPTS[:2], greedy()) == expected
    with pytest.raises(ConfigError, match=r"groups of one size, their columns side by side in g_idx: use dtype bf"):
        device_engine(tmp_path, "int4")
    damage(tmp_path, {f"{Q}.g_idx": torch.full((256,), 2, dtype=torch.int32)})
    with pytest.raises(ConfigError, match=rf"'{Q}.g_idx' does not say for 256 columns which of 2 scales"):
        load_engine(settings(model=str(tmp_path)))


def test_an_order_of_zeros_alone_is_none(tmp_path):
    model = save_quantized(tmp_path, replace(LAYOUTS["gptq"], config=gptq_config(desc_act=True)))
    damage(tmp_path, {f"{Q}.g_idx": torch.zeros(256, dtype=torch.int32)})
    source = open_weights(open_checkpoint(str(tmp_path)))
    assert torch.equal(source.tensor(f"{Q}.weight"), model.state_dict()[f"{Q}.weight"])


@pytest.mark.parametrize("name", ["deepseek", "awq"])
def test_shapes_that_the_kernels_do_not_take_are_refused_on_a_gpu_alone(name, tmp_path):
    save_quantized(tmp_path, LAYOUTS[name], num_key_value_heads=1)
    with pytest.raises(ConfigError, match=r"matrices of model.layers.0.qkv are .*: use dtype bfloat16"):
        device_engine(tmp_path, kept_dtype(name))
    assert answers(device_engine(tmp_path, "bfloat16"), PROMPTS[:1], greedy(2))
    assert answers(load_engine(settings(model=str(tmp_path))), PROMPTS[:1], greedy(2))


WEIGHTS_ONLY = compressed("channel", None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported: compressed-tensors, fp8"),
        (compressed("channel", TOKEN, format="pack-quantized"), "group_0.weights.type is 'float'; supported: int"),
        (compressed("channel", TOKEN, format="marlin-24"), "format is 'marlin-24'; supported: null, float-quantized"),
        (compressed_integers("pack-quantized", 3, "group", group_size=128), "weights.num_bits is 3; supported: 8, 4"),
        (compressed_integers("pack-quantized", 4, "group", group_size=0), "weights.group_size is 0; a number of"),
        (compressed_integers("pack-quantized", 4, "tensor", symmetric=False), "weights.symmetric is False"),
        (compressed_integers("int-quantized", 8, "group"), "weights.strategy is 'group'; supported: channel, tensor"),
        (compressed_integers("int-quantized", 4, "channel"), "weights.num_bits is 4; supported: 8"),
        (compressed_integers("nvfp4-pack-quantized", 4, "group", type="float"), "strategy is 'group'"),
        (compressed("group", TOKEN), r"config_groups.group_0.weights.strategy is 'group'; supported: tensor, channel"),
        (compressed("channel", {**TOKEN, "type": "int"}), "group_0.input_activations.type is 'int'; supported: float"),
        (compressed("channel", {**TOKEN, "num_bits": 4}), "group_0.input_activations.num_bits is 4; supported: 8"),
        (compressed("block", TOKEN, block_structure=[64, 64]), r"structure is \[64, 64\]; supported: \[128, 128\]"),
        (compressed("channel", TOKEN, kv_cache_scheme={**FP8_KV, "num_bits": 4}), "kv_cache_scheme.num_bits is 4"),
        (compressed("channel", TOKEN, sparsity_config={"format": "sparse-24"}), "sparsity_config.format is"),
        (compressed("channel", TOKEN, transform_config={"a": 1}), "transform_config is .*it is not supported"),
        (
            compressed("tensor", STATIC, config_groups={"a": WEIGHTS_ONLY, "b": compressed("tensor", TOKEN)}),
            "type is None|a mix of schemes",
        ),
        (block_config(weight_block_size=[64, 64]), r"weight_block_size is \[64, 64\]"),
        (block_config(activation_scheme="block"), "activation_scheme is 'block'; supported: dynamic, static"),
        (block_config(fmt="e5m2"), "fmt is 'e5m2'; supported: e4m3"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "algo is 'NVFP4_AWQ'; supported: FP8, FP8_PER_CHAN"),
        (gptq_config(bits=3), "bits is 3; supported: 4, 8"),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format is 'marlin'; supported: gptq, gptq_v2"),
        (gptq_config(dynamic={"-:.*down.*": {}}), "dynamic is "),
        (gptq_config(group_size=0), "group_size is 0; a number of columns"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'; supported: gemm"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point is False; supported: True"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "backend is 'llm-awq'; its layout is not supported"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "lm_head"}, "convert is 'lm_head'; a list"),
    ],
)  # fmt: skip
def test_what_would_be_computed_wrongly_is_refused_by_the_name_of_its_field(config, words):
    with pytest.raises(ConfigError, match=f"^here: quantization_config.*{words}.*use another quantization"):
        read_quantization({"quantization_config": config}, {}, "here")


def test_the_name_that_compressed_tensors_had_for_its_table_is_known():
    table = compressed("channel", TOKEN)
    older = {name: value for name, value in table.items() if name != "quant_method"}
    found = read_quantization({"compression_config": older}, {}, "here")
    assert found is not None and found == read_quantization({"quantization_config": table}, {}, "here")


def test_a_mix_of_schemes_is_refused():
    config = compressed("channel", TOKEN)
    config["config_groups"]["group_1"] = compressed("tensor", TOKEN)["config_groups"]["group_0"]
    with pytest.raises(ConfigError, match="config_groups is 'a mix of schemes'; one for all modules"):
        read_quantization({"quantization_config": config}, {}, "here")


@pytest.mark.parametrize(
    ("entry", "module", "is_skipped"),
    [
        ("lm_head", "lm_head", True),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj", True),
        ("model.layers.1*", "model.layers.1.mlp.up_proj", True),
        ("layers.1", "model.layers.11.mlp.up_proj", False),
        ("mlp", "model.layers.1.mlp.up_proj", True),
        ("up_proj", "model.layers.1.mlp.gate_up_proj", False),
    ],
)
def test_lists_of_what_stays_plain_name_modules(entry, module, is_skipped):
    found = read_quantization({"quantization_config": compressed("channel", TOKEN, ignore=[entry])}, {}, "here")
    assert found is not None and found.skips(module) is is_skipped


@pytest.mark.parametrize(
    ("config", "cc", "dtype"),
    [
        (compressed("channel", TOKEN), 90, "float8"),
        (compressed("channel", TOKEN), 80, "float32"),
        (WEIGHTS_ONLY, 90, "float8"),
        (block_config(), 100, "float8"),
        (gptq_config(), 90, "int4"),
        (gptq_config(group_size=-1), 90, "int4"),
        (gptq_config(group_size=256), 90, "int4"),
        (gptq_config(group_size=64), 90, "bfloat16"),
        (gptq_config(desc_act=True), 90, "bfloat16"),
        (gptq_config(bits=8), 90, "bfloat16"),
        (compressed_integers("pack-quantized", 4, "channel"), 90, "int4"),
        (compressed_integers("pack-quantized", 4, "group", group_size=128, actorder="static"), 90, "int4"),
        (compressed_integers("int-quantized", 8, "channel", INT8_TOKEN), 90, "bfloat16"),
    ],
)
def test_auto_keeps_what_is_stored_where_the_kernels_take_it(config, cc, dtype, tmp_path):
    save_quantized(tmp_path, LAYOUTS["gptq"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    checkpoint = open_checkpoint(str(tmp_path))
    assert resolve_device_dtype("auto", checkpoint, cc) == dtype
    assert resolve_device_dtype("float32", checkpoint, cc) == "float32"
    assert (kept_as(checkpoint)[0] == "bfloat16") == (dtype == "bfloat16" and cc == 90)


@pytest.mark.parametrize(
    ("family", "hidden", "dtype"),
    [("llama", 2048, "float8"), ("llama", 1024, "bfloat16"), ("qwen3", 2048, "float8"), ("qwen2", 2048, "bfloat16")],
)
def test_auto_rounds_plain_weights_of_large_models_but_for_keys_with_biases(family, hidden, dtype, tmp_path):
    save_tiny(tmp_path, family)
    checkpoint = open_checkpoint(str(tmp_path))
    sized = replace(checkpoint, config=replace(checkpoint.config, hidden_size=hidden))
    assert resolve_device_dtype("auto", sized, 90) == dtype


@pytest.mark.parametrize(
    ("name", "dtype"), [("compressed-rows", "bfloat16"), ("deepseek", "bfloat16"), ("awq", "int4")]
)
def test_auto_keeps_no_keys_with_biases_in_e4m3(name, dtype, tmp_path):
    """That holds for stored FP8, too; INT4 has a bf16 cache."""
    save_quantized(tmp_path, LAYOUTS[name], "qwen2")
    checkpoint = open_checkpoint(str(tmp_path))
    assert resolve_device_dtype("auto", checkpoint, 90) == dtype
    assert resolve_device_dtype("float8", checkpoint, 90) == "float8"
