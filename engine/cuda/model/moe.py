"""A mixture of experts on a GPU.

Routed, sorted by expert, multiplied in groups and added up, without the host.

Shapes: T rows, K experts of a row, E experts, H hidden size, I an expert's inner size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.model.number_formats import E4M3, DeviceFormat
from kernels.registry import Registry
from kernels.specs import ExpertFormat, MoESpec, QuantSpec
from kernels.workspace import moe_workspace_nbytes
from models.config import ModelConfig

_PLAIN: dict[torch.dtype, ExpertFormat] = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class ExpertWeights:
    """`router` `[E, H]` as the activations are, `gate_up` `[E, 2I, H]`, `down` `[E, H, I]`.

    Scales for each row (`[E, 2I]`, `[E, H]`) where the weights are e4m3. MXFP4: words and scales `[E, ...]` of
    kernels.layouts.tile_mxfp4, gates and ups paired. Biases `[E]`, `[E, 2I]`, `[E, H]` as the activations are, or none.
    """

    router: Tensor
    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def expert_spec(config: ModelConfig, number_format: DeviceFormat) -> MoESpec:
    experts = config.experts
    assert experts is not None, "this model has none"
    weights: ExpertFormat = "e4m3" if number_format.is_fp8 else _PLAIN[number_format.rows]
    return MoESpec(
        experts.count,
        experts.top_k,
        config.hidden_size,
        experts.intermediate_size,
        experts.renormalize,
        activation="swiglu_oai" if experts.as_gpt_oss else "silu",
        weights="mxfp4" if experts.is_mxfp4 and number_format.keeps_mxfp4 else weights,
        bias=experts.as_gpt_oss,
    )


class DeviceMoE:
    """What the mixtures of all layers share: operations, and room for `max_rows` rows."""

    def __init__(
        self, config: ModelConfig, number_format: DeviceFormat, registry: Registry, max_rows: int, device: torch.device
    ) -> None:
        spec = expert_spec(config, number_format)
        self._route, self._experts = registry.get("moe_route", spec), registry.get("moe_experts", spec)
        self._quant = registry.get("quant_fp8", QuantSpec(spec.hidden))
        self._scales_input = config.experts is not None and config.experts.as_llama4
        self._weights = torch.empty(max_rows, spec.top_k, device=device)
        self._ids = torch.empty(max_rows, spec.top_k, dtype=torch.int32, device=device)
        rounds = spec.weights == "e4m3"
        self._rows = torch.empty(max_rows, spec.hidden, dtype=E4M3, device=device) if rounds else None
        self._scale = torch.empty(max_rows, device=device)
        self._workspace = torch.empty(moe_workspace_nbytes(spec, max_rows), dtype=torch.uint8, device=device)

    def __call__(self, layer: ExpertWeights, x: Tensor, out: Tensor) -> None:
        """`x` and `out` `[T, H]`, as the activations are."""
        count = len(x)
        weights, ids, scale = self._weights[:count], self._ids[:count], self._scale[:count]
        scores = _scores(x, layer.router)
        self._route(scores, weights, ids, bias=layer.router_bias)
        share = scores.amax(1).sigmoid_() if self._scales_input else None
        rows = x
        if self._rows is not None:
            rows = self._rows[:count]
            self._quant(x, rows, scale)
            scale = scale if share is None else scale.mul_(share)
        elif share is not None:
            rows = (x * share[:, None]).to(x.dtype)
        self._experts(
            rows, scale, weights, ids, layer.gate_up, layer.gate_up_scale, layer.down, layer.down_scale, out,
            self._workspace, b1=layer.gate_up_bias, b2=layer.down_bias,
        )  # fmt: skip


def _scores(x: Tensor, router: Tensor) -> Tensor:
    """`[T, E]` float32: rounded to bf16, many would be equal."""
    if x.is_cuda and x.dtype is torch.bfloat16:
        return torch.mm(x, router.t(), out_dtype=torch.float32)
    return x.float() @ router.float().t()
