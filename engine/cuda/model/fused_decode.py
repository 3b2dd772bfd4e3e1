"""A decode step of seven launches a layer for FP8 models.

Docs/design/kernels.md says what makes it fast.

Attention takes the qkv product and does rope, append, attention and rounding in one launch; SiLU and rounding are the
epilogue of gate and up; split-K parts and deferred scales are added up and applied by whoever reads a product.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.cuda.inputs.decode_state import DecodeState
from engine.cuda.kv.kv_cache import DeviceCache
from engine.cuda.model.attention import decode_workspace
from engine.cuda.model.format_choice import has_fused_step
from engine.cuda.model.linear import unrounded
from engine.cuda.model.matrices import Matrix
from engine.cuda.model.number_formats import E4M3, DeviceFormat
from engine.cuda.model.weights import DeviceLayerWeights, DeviceWeights
from engine.cuda.runtime.graph_capture import Launch
from engine.cuda.runtime.process_group import SINGLE_PROCESS, ProcessGroup
from kernels.decode_plan import DecodeGemmPlan, decode_plan
from kernels.registry import Registry
from kernels.specs import FusedAttnSpec, GateUpSpec, GemmSpec, NormSpec, SiluSpec
from models.config import ModelConfig


def is_fusible(config: ModelConfig, number_format: DeviceFormat, weights: DeviceWeights) -> bool:
    """All that has to be e4m3 is, with scales by row."""
    return (
        number_format.is_fp8
        and has_fused_step(config)
        and all(matrix.recipe == "row" for layer in weights.layers for matrix in layer.matrices())
        and weights.head.recipe in ("plain", "row")
    )


def _nothing_to_note(index: int, residual: Tensor) -> None:
    """Nobody reads what goes into a layer."""


class FusedDecode:
    """A decode step in few launches.

    `scales` `[layers, 2]`: what attention's output and the MLP's middle are divided by before they are rounded.
    `drafts`: steps may have rows of drafts. `note_aux` of a layer and what goes into it, for a draft head.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DeviceWeights,
        registry: Registry,
        cache: DeviceCache,
        state: DecodeState,
        scales: Tensor,
        team: ProcessGroup = SINGLE_PROCESS,
        drafts: bool = False,
        note_aux: Callable[[int, Tensor], None] = _nothing_to_note,
    ) -> None:
        self.group, self.drafts, self.note_aux = team, drafts, note_aux
        self.config, self.weights, self.registry, self.cache, self.state = config, weights, registry, cache, state
        # One copy a row, as the row-wise product reads them.
        self.scales = scales[:, :, None].expand(-1, -1, state.max_rows).contiguous()
        self._allocate(state.max_rows, state.device)

    def step(self, rows: int, max_len: int) -> Launch:
        return FusedStep(self, rows, max_len)

    def _allocate(self, max_rows: int, device: torch.device) -> None:
        config = self.config
        hidden, inner, q_width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        widths = {"qkv": q_width + 2 * config.num_kv_heads * config.head_dim, "o": hidden, "down": hidden}

        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(max_rows, width, dtype=dtype, device=device)

        self.residual, self.normed = empty(hidden, torch.bfloat16), empty(hidden, torch.bfloat16)
        self.x, self.x_scale = empty(hidden, E4M3), torch.empty(max_rows, device=device)
        self.mixed, self.middle = empty(q_width, E4M3), empty(inner, E4M3)
        self.gate_up = empty(2 * inner, torch.bfloat16)
        self.parts = {
            name: torch.empty(2 * max_rows * width, dtype=torch.float32, device=device)
            for name, width in widths.items()
        }
        self.workspace = decode_workspace(config, max_rows, device)

    def products(self, name: str, num_parts: int, rows: int) -> Tensor:
        """`[parts, rows, width]` float32 where a product is split, else bf16: the same memory for every batch."""
        flat = self.parts[name]
        width = len(flat) // (2 * self.state.max_rows)
        typed = flat if num_parts > 1 else flat.view(torch.bfloat16)
        return typed[: num_parts * rows * width].view(num_parts, rows, width)


class FusedStep:
    """One batch size: bound operations and views of the shared buffers.

    Call it: DecodeState.logits are written.
    """

    def __init__(self, shared: FusedDecode, rows: int, max_len: int) -> None:
        self._shared, self._rows = shared, rows
        plan, self._is_alone = decode_plan(rows), shared.group.shard.size == 1
        # A sum over a team wants whole and finished products.
        self._plan = plan if self._is_alone else replace(plan, o_parts=1, down_parts=1)
        self._residual, self._normed = shared.residual[:rows], shared.normed[:rows]
        self._x, self._x_scale = shared.x[:rows], shared.x_scale[:rows]
        self._mixed, self._middle = shared.mixed[:rows], shared.middle[:rows]
        self._gate_up_out = shared.gate_up[:rows]
        self._products = {name: shared.products(name, self._plan.parts(name), rows) for name in shared.parts}
        self._tables, self._lengths = shared.state.tables[:rows], shared.state.lengths[:rows]
        self._behind = shared.state.behind[:rows] if shared.drafts else None
        self._bind(max_len)

    @torch.inference_mode()
    def __call__(self) -> None:
        shared = self._shared
        weights, layers = shared.weights, shared.weights.layers
        token_ids = shared.state.gather_tokens(self._rows)
        self._norm_embedding(
            weights.embedding, self._residual, layers[0].attention_gain, shared.config.norm_eps, self._x,
            self._x_scale, ids=token_ids,
        )  # fmt: skip
        gains = [layer.attention_gain for layer in layers[1:]]
        for index, layer in enumerate(layers):
            mixed_scale, middle_scale = shared.scales[index]
            shared.note_aux(index, self._residual)
            self._attention(index, layer, mixed_scale)
            self._product("o", layer.output, self._mixed, mixed_scale)
            scales = self._applied("o", layer.output, mixed_scale)
            self._norms["o"](*self._norm_inputs("o", layer.mlp_gain), **scales)
            self._mlp(layer, middle_scale)
            self._product("down", layer.down, self._middle, middle_scale)
            if index < len(gains):
                scales = self._applied("down", layer.down, middle_scale)
                self._norms["down"](*self._norm_inputs("down", gains[index]), **scales)
        self._head(self._applied("down", layers[-1].down, shared.scales[-1, 1]))

    def _bind(self, max_len: int) -> None:
        config, plan = self._shared.config, self._plan
        hidden, inner, page = config.hidden_size, config.intermediate_size, self._shared.cache.layout.block_size
        self._norm_embedding = self._get("add_rmsnorm_quant", NormSpec(hidden, "token", embed=True))
        self._norms = {
            name: self._get("add_rmsnorm_quant", NormSpec(hidden, "token", plan.parts(name), self._defers(name)))
            for name in ("o", "down")
        }
        head = self._shared.weights.head
        quant = "none" if head.scale is None else "token"
        self._norm_end = self._get("add_rmsnorm_quant", NormSpec(hidden, quant, plan.down_parts, self._defers("down")))
        self._gemms = {
            name: self._get("gemm_fp8", self._gemm_spec(name, plan, *matrix.weight.shape))
            for name, matrix in self._matrices().items()
        }
        self._gate_up = (
            self._get("gemm_gate_up", GateUpSpec(2 * inner, hidden))
            if plan.fused_gate_up
            else self._get("gemm_fp8", GemmSpec(2 * inner, hidden, deferred=plan.deferred))
        )
        self._silu = self._get("silu_mul_quant", SiluSpec(inner, "tensor", plan.deferred))
        if head.scale is not None:
            self._head_gemm = self._get("gemm_fp8", GemmSpec(len(head.weight), hidden, skinny=plan.own_head))
        spec = FusedAttnSpec(
            config.num_heads, config.num_kv_heads, config.head_dim, page, "tensor", plan.qkv_parts, plan.deferred,
            biased=config.qkv_bias, normed=config.qk_norm,
        )  # fmt: skip
        attention = self._get("attn_decode_fused", spec)
        self._attend = partial(attention, sm_scale=config.head_dim**-0.5, eps=config.norm_eps, max_len=max_len)

    def _get(self, op: str, spec: Any) -> Callable[..., None]:
        """Bound to whether launches of this plan overlap; the reference knows nothing of that."""
        bound = self._shared.registry.get(op, spec)
        knows = "pdl" in inspect.signature(bound).parameters
        return partial(bound, pdl=self._plan.pdl) if knows and not self._plan.pdl else bound

    def _gemm_spec(self, name: str, plan: DecodeGemmPlan, n: int, k: int) -> GemmSpec:
        if plan.deferred:
            return GemmSpec(n, k, deferred=self._defers(name))
        return GemmSpec(n, k, parts=plan.parts(name), skinny=True)

    def _matrices(self) -> dict[str, Matrix]:
        layer = self._shared.weights.layers[0]
        return {"qkv": layer.qkv, "o": layer.output, "down": layer.down}

    def _attention(self, index: int, layer: DeviceLayerWeights, mixed_scale: Tensor) -> None:
        cache = self._shared.cache.layer(index)
        self._product("qkv", layer.qkv, self._x, self._x_scale)
        self._attend(
            self._products["qkv"], cache.keys, cache.values, self._tables, self._lengths,
            self._shared.weights.cos_sin, self._mixed, mixed_scale, self._shared.workspace,
            k_scale=cache.k_scale, v_scale=cache.v_scale, bias=layer.qkv.bias, q_gain=layer.q_gain,
            k_gain=layer.k_gain, behind=self._behind, **self._applied("qkv", layer.qkv, self._x_scale),
        )  # fmt: skip

    def _mlp(self, layer: DeviceLayerWeights, middle_scale: Tensor) -> None:
        matrix = layer.gate_up
        if self._plan.fused_gate_up:
            self._gate_up(self._x, matrix.weight, self._x_scale, matrix.scale, self._middle, middle_scale)
        else:
            self._gate_up(self._x, matrix.weight, self._x_scale, matrix.scale, self._gate_up_out)
            scales = self._applied("gate_up", matrix, self._x_scale)
            self._silu(self._gate_up_out, self._middle, middle_scale, **scales)

    def _head(self, scales: dict[str, Tensor]) -> None:
        head, gain, logits = self._shared.weights.head, self._shared.weights.final_gain, self._shared.state.logits
        eps, total = self._shared.config.norm_eps, self._products["down"]
        out = self._normed if head.scale is None else self._x
        self._norm_end(total, self._residual, gain, eps, out, self._x_scale, **scales)
        logits = logits[: self._rows]
        if head.scale is None:
            columns = logits if self._is_alone else logits.new_empty(self._rows, len(head.weight))
            unrounded(out, head.weight, columns)
        else:
            columns = self._residual.new_empty(self._rows, len(head.weight))
            self._head_gemm(out, head.weight, self._x_scale, head.scale, columns)
        if columns is not logits:
            logits.copy_(self._shared.group.gather(columns))

    def _product(self, name: str, matrix: Matrix, x: Tensor, x_scale: Tensor) -> None:
        self._gemms[name](x, matrix.weight, x_scale[: self._rows], matrix.scale, self._products[name])
        if name != "qkv":
            self._shared.group.add(self._products[name])

    def _norm_inputs(self, name: str, gain: Tensor) -> tuple[Any, ...]:
        eps = self._shared.config.norm_eps
        return self._products[name], self._residual, gain, eps, self._x, self._x_scale

    def _defers(self, name: str) -> bool:
        return self._plan.deferred and (self._is_alone or name in ("qkv", "gate_up"))

    def _applied(self, name: str, matrix: Matrix, token_scale: Tensor) -> dict[str, Any]:
        """The scales that a deferred product still lacks."""
        if not self._defers(name):
            return {}
        return {"token_scale": token_scale, "channel_scale": matrix.scale}
