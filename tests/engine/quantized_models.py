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
    return model


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


def int4(weight: Tensor, groups: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes `[n, k]`, zeros and float16 scales `[n, groups]`, and what they stand for; `groups` `[k]`."""
    zeros, scales, codes = [], [], torch.empty(weight.shape, dtype=torch.long)
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
        scale = (2 * part.abs().amax(1, keepdim=True) if symmetric else high - low) / 15
        scale = scale.half()
        zero = torch.full_like(low, 8) if symmetric else (-low / scale).round().clamp(1, 15)
        codes[:, groups == group] = ((part / scale).round() + zero).clamp(0, 15).long()
        zeros.append(zero)
        scales.append(scale)
    zero, scale = torch.cat(zeros, 1).long(), torch.cat(scales, 1)
    return codes, zero, scale, (codes - zero[:, groups]).float() * scale.float()[:, groups]


def words(nibbles: Tensor) -> Tensor:
    """`[rows, 8]` of 0..15, lowest first, to int32."""
    value = (nibbles << (4 * torch.arange(8))).sum(1)
    return torch.where(value >= 2**31, value - 2**32, value).to(torch.int32)


def gptq(weight: Tensor, group: int = 128, symmetric: bool = False, act_order: bool = False, shift: int = 1) -> Packed:
    """qweight `[k / 8, n]`: a word holds eight columns of one row; qzeros `[groups, n / 8]`: zeros less `shift`."""
    k = weight.shape[1]
    groups = torch.arange(k) // (k if group == -1 else group)
    if act_order:
        groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(3))]
    codes, zero, scale, dense = int4(weight, groups, symmetric)
    qweight = torch.stack([words(codes[:, 8 * word : 8 * word + 8]) for word in range(k // 8)])
    qzeros = torch.stack([words((column - shift).view(-1, 8)) for column in zero.t()])
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scale.t(), "g_idx": groups.to(torch.int32)}
    return tensors, dense


def awq(weight: Tensor, group: int = 128) -> Packed:
    """qweight `[k, n / 8]`, qzeros `[groups, n / 8]`: a word holds eight rows, in the order of AWQ_COLUMNS."""
    k = weight.shape[1]
    codes, zero, scale, dense = int4(weight, torch.arange(k) // group, symmetric=False)
    order = list(AWQ_COLUMNS)
    qweight = torch.stack([words(column.view(-1, 8)[:, order]) for column in codes.t()])
    qzeros = torch.stack([words(column.view(-1, 8)[:, order]) for column in zero.t()])
    return {"qweight": qweight, "qzeros": qzeros, "scales": scale.t()}, dense


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
