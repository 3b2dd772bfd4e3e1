"""Tiny models in the layouts of quantized checkpoints, packed here from the formats' definitions."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from kernels.reference.quant import pack_e2m1, unpack_e2m1
from tests.engine.tiny_models import save_tiny

WIDTHS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
"""Whole tiles of every kernel: blocks of 128 rows, groups of 128 columns."""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)

Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by what follows a module's name, and the float32 weight that they stand for."""


@dataclass(frozen=True)
class Layout:
    """`pack` quantizes one weight; `config` is its quantization_config, `exported` its hf_quant_config.json."""

    pack: Callable[[Tensor], Packed]
    config: dict[str, Any] = field(default_factory=dict)
    exported: dict[str, Any] = field(default_factory=dict)
    kv_names: tuple[str, str] | None = None


def save_quantized(
    folder: Path, layout: Layout, family: str = "llama3", plain: tuple[str, ...] = ("lm_head",), **changes: Any
) -> PreTrainedModel:
    """Returns the model that the checkpoint stands for, in float32. `plain`: parts of names that stay as they are."""
    model = save_tiny(folder, family, **{**WIDTHS, **changes})
    tensors = load_file(folder / "model.safetensors")
    dense = {}
    for name in list(tensors):
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.endswith((*LINEAR, "lm_head")) and not any(part in module for part in plain):
            packed, dense[name] = layout.pack(tensors.pop(name))
            tensors |= {f"{module}.{key}": value.contiguous() for key, value in packed.items()}
    for layer in range(model.config.num_hidden_layers if layout.kv_names else 0):
        for key, scale in zip(layout.kv_names or (), (0.25, 0.5), strict=True):
            tensors[f"model.layers.{layer}.self_attn.{key}"] = torch.tensor(scale * (layer + 1))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": layout.config} if layout.config else {}
    (folder / "config.json").write_text(json.dumps(config))
    if layout.exported:
        (folder / "hf_quant_config.json").write_text(json.dumps(layout.exported))
    model.load_state_dict(dense, strict=False)
    _take_experts(model, dense)
    return model


def _take_experts(model: PreTrainedModel, dense: dict[str, Tensor]) -> None:
    """Give a model that has its experts in one tensor those that a file has one by one."""
    for name, weight in dense.items():
        stem, found, rest = name.partition(".mlp.experts.")
        if not found:
            continue
        number, kind, _ = rest.split(".")
        whole = model.get_parameter(f"{stem}.mlp.experts.{'down' if kind == 'down_proj' else 'gate_up'}_proj")
        first = len(weight) if kind == "up_proj" else 0
        whole.data[int(number), first : first + len(weight)] = weight


@dataclass(frozen=True)
class Llama4Layout(Layout):
    """`pack_experts` quantizes a matrix of each expert, transposed `[experts, k, n]`, of a name in the file."""

    pack_experts: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]] = field(kw_only=True)


def save_quantized_llama4(folder: Path, layout: Llama4Layout, **changes: Any) -> PreTrainedModel:
    """Save a quantized Llama 4 whose layer 2 keeps its attention plain; see save_quantized."""
    model = save_quantized(folder, layout, "llama4", plain=("lm_head", "layers.2.self_attn"), **changes)
    tensors, dense = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        packed, dense[name] = layout.pack_experts(name, tensors.pop(name))
        tensors |= {key: value.contiguous() for key, value in packed.items()}
    save_file(tensors, folder / "model.safetensors")
    model.load_state_dict(dense, strict=False)
    return model


def damage(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Other tensors in the file; None takes one out."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def expert_modules(name: str, stacked: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A module for each matrix of each expert, by row: Meta's FP8 Maverick, llm-compressor."""
    stem, _, kind = name.rpartition(".")
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    tensors, dense = {}, torch.empty_like(stacked)
    for expert, matrix in enumerate(stacked):
        parts = [fp8_rows(part.t()) for part in matrix.chunk(len(kinds), 1)]
        for part, (packed, _) in zip(kinds, parts, strict=True):
            tensors |= {f"{stem}.{expert}.{part}.{key}": value for key, value in packed.items()}
        dense[expert] = torch.cat([widened for _, widened in parts]).t()
    return tensors, dense


def stacked_by_matrix(name: str, stacked: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """One scale for a matrix of all experts, and one for its activations: ModelOpt."""
    scale = stacked.abs().max() / 448
    rounded, dense = fp8(stacked, scale)
    return {name: rounded, f"{name}_weight_scale": scale, f"{name}_input_scale": torch.tensor(0.05)}, dense


def stacked_by_row(name: str, stacked: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """fbgemm, as transformers writes it: `[experts, 1, 2 * inner]` beside gate and up, `[experts, hidden, 1]` beside
    down.
    """
    scale = stacked.abs().amax(1, keepdim=True) / 448
    rounded, dense = fp8(stacked, scale)
    return {name: rounded, f"{name}_scale": scale if "gate_up" in name else scale.transpose(1, 2)}, dense


def fp8(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 of weight / scale, and what that stands for."""
    rounded = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return rounded, rounded.float() * scale


def fp8_rows(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 448
    rounded, dense = fp8(weight, scale)
    return {"weight": rounded, "weight_scale": scale}, dense


def fp8_matrix(weight: Tensor, input_name: str = "input_scale", name: str = "weight_scale") -> Packed:
    """Static: rows of activations are divided by one number too."""
    scale = weight.abs().max() / 448
    rounded, dense = fp8(weight, scale)
    return {"weight": rounded, name: scale, input_name: torch.tensor(0.05)}, dense


def fp8_blocks(weight: Tensor, name: str = "weight_scale_inv") -> Packed:
    blocks = F.pad(weight, (0, 0, 0, -len(weight) % 128)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = blocks.abs().amax((1, 3)) / 448
    rounded, dense = fp8(weight, scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight)])
    return {"weight": rounded, name: scale}, dense


def integers(
    weight: Tensor, groups: Tensor, symmetric: bool, bits: int = 4, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes `[n, k]`, zeros and scales `[n, groups]`, and what they stand for; `groups` `[k]`."""
    zeros, scales, codes, most = [], [], torch.empty(weight.shape, dtype=torch.long), 2**bits - 1
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
        scale = (2 * part.abs().amax(1, keepdim=True) if symmetric else high - low) / most
        scale = scale.to(dtype)
        zero = torch.full_like(low, 2 ** (bits - 1)) if symmetric else (-low / scale).round().clamp(1, most)
        codes[:, groups == group] = ((part / scale).round() + zero).clamp(0, most).long()
        zeros.append(zero)
        scales.append(scale)
    zero, scale = torch.cat(zeros, 1).long(), torch.cat(scales, 1)
    return codes, zero, scale, (codes - zero[:, groups]).float() * scale.float()[:, groups]


def words(codes: Tensor) -> Tensor:
    """`[rows, 8]` of 0..15, or `[rows, 4]` of 0..255, lowest first, to int32."""
    value = (codes << (32 // codes.shape[1] * torch.arange(codes.shape[1]))).sum(1)
    return torch.where(value >= 2**31, value - 2**32, value).to(torch.int32)


def gptq(
    weight: Tensor, group: int = 128, symmetric: bool = False, act_order: bool = False, shift: int = 1, bits: int = 4
) -> Packed:
    """qweight `[k / 8, n]`: a word holds eight columns of one row; qzeros `[groups, n / 8]`: zeros less `shift`.

    Four of 8 `bits`.
    """
    k, count = weight.shape[1], 32 // bits
    groups = torch.arange(k) // (k if group == -1 else group)
    if act_order:
        groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(3))]
    codes, zero, scale, dense = integers(weight, groups, symmetric, bits)
    qweight = torch.stack([words(codes[:, first : first + count]) for first in range(0, k, count)])
    qzeros = torch.stack([words((column - shift).view(-1, count)) for column in zero.t()])
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scale.t(), "g_idx": groups.to(torch.int32)}
    return tensors, dense


def awq(weight: Tensor, group: int = 128) -> Packed:
    """qweight `[k, n / 8]`, qzeros `[groups, n / 8]`: a word holds eight rows, in the order of AWQ_COLUMNS."""
    k = weight.shape[1]
    codes, zero, scale, dense = integers(weight, torch.arange(k) // group, symmetric=False)
    order = list(AWQ_COLUMNS)
    qweight = torch.stack([words(column.view(-1, 8)[:, order]) for column in codes.t()])
    qzeros = torch.stack([words(column.view(-1, 8)[:, order]) for column in zero.t()])
    return {"qweight": qweight, "qzeros": qzeros, "scales": scale.t()}, dense


def packed(weight: Tensor, group: int = 128, symmetric: bool = True, act_order: bool = False, bits: int = 4) -> Packed:
    """compressed-tensors' pack-quantized: words along rows, zeros along columns; both less 2^(bits - 1), as signed."""
    (n, k), count = weight.shape, 32 // bits
    groups = torch.arange(k) // (k if group == -1 else group)
    order = {}
    if act_order:
        groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(3))]
        order = {"weight_g_idx": groups.to(torch.int32)}
    codes, zero, scale, dense = integers(weight, groups, symmetric, bits, torch.bfloat16)
    tensors = {
        "weight_packed": torch.stack([words(row.view(-1, count)) for row in codes]),
        "weight_scale": scale,
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.stack([words(column.view(-1, count)) for column in zero.t()]).t()
    return {**tensors, **order}, dense


def int8_rows(weight: Tensor, symmetric: bool = True) -> Packed:
    """compressed-tensors' int-quantized: int8 and a scale for each row."""
    codes, zero, scale, dense = integers(weight, torch.zeros(weight.shape[1]).long(), symmetric, 8, torch.bfloat16)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
    return tensors | ({} if symmetric else {"weight_zero_point": (zero - 128).to(torch.int8)}), dense


def nvfp4(weight: Tensor, is_modelopt: bool) -> Packed:
    """e2m1 in pairs beside e4m3 scales of 16 columns, and one for all, that divides or, of ModelOpt, multiplies."""
    whole = weight.abs().max() / (448 * 6)
    blocks = weight.unflatten(1, (-1, 16))
    scale = (blocks.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    factor = scale.float() * whole if is_modelopt else scale.float() * (1 / (1 / whole))
    pairs = pack_e2m1((blocks / factor[..., None].clamp_min(1e-9)).flatten(1))
    dense = unpack_e2m1(pairs) * factor.repeat_interleave(16, 1)
    if is_modelopt:
        return {"weight": pairs, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.ones(())}, dense
    named = {"weight_packed": pairs, "weight_scale": scale, "weight_global_scale": (1 / whole).view(1)}
    return named | {"input_global_scale": torch.ones(1)}, dense


def compressed_integers(
    packing: str, bits: int, strategy: str, activations: Any = None, **weights: Any
) -> dict[str, Any]:
    """The configuration of such a checkpoint, as compressed-tensors writes it."""
    number = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, "dynamic": False, **weights}
    config = compressed("channel", None, format=packing)
    config["config_groups"]["group_0"] |= {"weights": number, "input_activations": activations, "format": packing}
    return config


def compressed(strategy: str, activations: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {
        **number,
        "strategy": strategy,
        "dynamic": False,
        "block_structure": changes.pop("block_structure", None),
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if activations is None else {**number, **activations},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **changes,
    }


def block_config(**changes: Any) -> dict[str, Any]:
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {**config, **changes}


def gptq_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False, **changes}


TOKEN = {"strategy": "token", "dynamic": True}
STATIC = {"strategy": "tensor", "dynamic": False}
INT8_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
NVFP4_INPUT = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
FP8_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
LAYOUTS = {
    "compressed-rows": Layout(fp8_rows, compressed("channel", TOKEN)),
    "compressed-matrix": Layout(
        fp8_matrix, compressed("tensor", STATIC, kv_cache_scheme=FP8_KV), kv_names=("k_scale", "v_scale")
    ),
    "compressed-blocks": Layout(
        lambda weight: fp8_blocks(weight, "weight_scale"),
        compressed("block", {"strategy": "group", "group_size": 128, "dynamic": True}, block_structure=[128, 128]),
    ),
    "compressed-rows-only": Layout(fp8_rows, compressed("channel", None)),
    "compressed-blocks-only": Layout(
        lambda weight: fp8_blocks(weight, "weight_scale"), compressed("block", None, block_structure=[128, 128])
    ),
    "modelopt": Layout(
        fp8_matrix,
        exported={
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head*"]},
        },
        kv_names=("k_proj.k_scale", "v_proj.v_scale"),
    ),
    "autofp8": Layout(
        fp8_matrix, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    ),
    "fbgemm": Layout(
        fp8_rows,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ),
    "deepseek": Layout(fp8_blocks, block_config(modules_to_not_convert=["lm_head"], scale_fmt="ue8m0")),
    "gptq": Layout(gptq, gptq_config()),
    "gptq-symmetric": Layout(lambda w: gptq(w, symmetric=True), gptq_config(sym=True)),
    "gptq-2": Layout(lambda w: gptq(w, shift=0), gptq_config(checkpoint_format="gptq_v2")),
    "gptq-row": Layout(lambda w: gptq(w, group=-1), gptq_config(group_size=-1)),
    "gptq-32": Layout(lambda w: gptq(w, group=32), gptq_config(group_size=32)),
    "gptq-act-order": Layout(lambda w: gptq(w, act_order=True), gptq_config(desc_act=True)),
    "awq": Layout(awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}),
    "gptq-8": Layout(lambda w: gptq(w, bits=8), gptq_config(bits=8)),
    "packed": Layout(packed, compressed_integers("pack-quantized", 4, "group", group_size=128)),
    "packed-asymmetric": Layout(
        lambda w: packed(w, symmetric=False),
        compressed_integers("pack-quantized", 4, "group", group_size=128, symmetric=False),
    ),
    "packed-row": Layout(lambda w: packed(w, group=-1), compressed_integers("pack-quantized", 4, "channel")),
    "packed-act-order": Layout(
        lambda w: packed(w, act_order=True),
        compressed_integers("pack-quantized", 4, "group", group_size=128, actorder="group"),
    ),
    "packed-8": Layout(
        lambda w: packed(w, 32, symmetric=False, bits=8),
        compressed_integers("pack-quantized", 8, "group", group_size=32, symmetric=False),
    ),
    "int8": Layout(int8_rows, compressed_integers("int-quantized", 8, "channel", INT8_TOKEN)),
    "int8-asymmetric": Layout(
        lambda w: int8_rows(w, symmetric=False),
        compressed_integers("int-quantized", 8, "channel", INT8_TOKEN, symmetric=False),
    ),
    "nvfp4": Layout(
        lambda w: nvfp4(w, is_modelopt=False),
        compressed_integers("nvfp4-pack-quantized", 4, "tensor_group", NVFP4_INPUT, type="float", group_size=16),
    ),
    "nvfp4-modelopt": Layout(
        lambda w: nvfp4(w, is_modelopt=True),
        exported={
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
        },
    ),
}
LLAMA4_LAYOUTS = {
    "llama4-compressed": Llama4Layout(
        fp8_rows,
        compressed(
            "channel",
            TOKEN,
            ignore=["re:.*lm_head", "re:.*router", "language_model.model.layers.2.self_attn", "re:vision_model.*"],
        ),
        pack_experts=expert_modules,
    ),
    "llama4-modelopt": Llama4Layout(
        fp8_matrix,
        exported={
            "producer": {"name": "modelopt"},
            "quantization": {
                "quant_algo": "FP8",
                "kv_cache_quant_algo": "FP8",
                "exclude_modules": ["*lm_head", "*router", "*layers.2.self_attn*", "*vision_model*"],
            },
        },
        kv_names=("k_proj.k_scale", "v_proj.v_scale"),
        pack_experts=stacked_by_matrix,
    ),
    "llama4-fbgemm": Llama4Layout(
        fp8_rows,
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head", "router", "layers.2.self_attn", "vision_model"],
        },
        pack_experts=stacked_by_row,
    ),
}
