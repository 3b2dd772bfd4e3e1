"""The decoder that all dense families share, over rows of any number of sequences, from the library's operations.

Between kernels rows are bf16 (or float32); beside e4m3 weights they are rounded to e4m3, one scale a token. Products of
e4m3 are left unscaled where the kernel that reads them applies the scales: exact, and faster than scaling in cuBLAS.

Shapes: T rows, H hidden size, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint.config import ModelConfig
from engine.cuda.cache import DeviceCache, LayerCache
from engine.cuda.formats import E4M3, DeviceFormat
from engine.cuda.weights import DeviceWeights, LayerWeights, Matrix
from kernels.registry import Registry
from kernels.specs import GemmSpec, NormSpec, QuantSpec, RopeSpec, SiluSpec

SINKS = 4
"""The first tokens of a text, where activations are hundreds of times the usual ones (Xiao et al. 2024, attention
sinks). No answer has such a token.
"""

Attend = Callable[[Tensor, LayerCache, Tensor], None]
"""(q `[T, heads, D]`, cache of one layer, out `[T, heads, D]`): attention of the rows over their own sequences."""


@dataclass(frozen=True)
class Rows:
    """`token_ids`, `positions`, `slots` `[T]`; `wanted` are the rows whose logits matter, None for all."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    wanted: Tensor | None


@dataclass(frozen=True)
class Scaled:
    """Rows as a product reads them: e4m3 with a scale each, or plain, where `scale` is of no use."""

    rows: Tensor
    scale: Tensor

    def select(self, index: Tensor) -> "Scaled":
        rows = self.rows.view(torch.uint8) if self.rows.dtype is E4M3 else self.rows
        return Scaled(rows.index_select(0, index).view(self.rows.dtype), self.scale.index_select(0, index))


class Transformer:
    """`max_rows`: the most rows of one call; their activations are allocated here, once.

    While `peaks` `[layers, 2]` is there, it takes the largest scales of attention's output and of the MLP's middle, the
    first tokens of a text left out.
    """

    def __init__(
        self,
        config: ModelConfig,
        number_format: DeviceFormat,
        weights: DeviceWeights,
        registry: Registry,
        block_size: int,
        max_rows: int,
    ) -> None:
        self._config, self._weights, self._format, self._registry = config, weights, number_format, registry
        self.peaks: Tensor | None = None
        self._gemms: dict[GemmSpec, Callable[..., None]] = {}
        # A bias, and a norm of each head, come before rope and want finished products.
        self._qkv_deferred = number_format.is_fp8 and not (config.qkv_bias or config.qk_norm)
        self._bind(block_size)
        self._allocate(max_rows, weights.embedding.device)

    @torch.inference_mode()
    def __call__(self, rows: Rows, cache: DeviceCache, attend: Attend) -> Tensor:
        """Writes K and V of all rows. Returns those that are wanted after the final norm, `[W, H]`, for `head`."""
        count, layers = len(rows.token_ids), self._weights.layers
        x, residual = Scaled(self._x[:count], self._x_scale[:count]), self._residual[:count]
        self._norm_embedding(
            self._weights.embedding, residual, layers[0].attention_gain, self._config.norm_eps, x.rows, x.scale,
            ids=rows.token_ids,
        )  # fmt: skip
        for index, layer in enumerate(layers):
            mixed = self._attention(layer, x, rows, cache.layer(index), attend)
            is_last = index == len(layers) - 1
            if is_last and rows.wanted is not None:
                # Only these go past the last attention: 3 % of a prompt's work.
                if not len(rows.wanted):
                    return residual[:0]
                mixed, residual = mixed.select(rows.wanted), residual.index_select(0, rows.wanted)
                x = Scaled(self._x[: len(residual)], self._x_scale[: len(residual)])
            middle = self._mlp(layer, mixed, residual, x)
            if self.peaks is not None:
                self.peaks[index] = torch.stack([mixed.scale[SINKS:].amax(), middle.scale[SINKS:].amax()])
            if not is_last:
                self._add_norm(self._norm, layer.down, middle, residual, layers[index + 1].attention_gain, x)
        out = Scaled(torch.empty_like(residual), self._x_scale)
        self._add_norm(self._norm_end, layers[-1].down, middle, residual, self._weights.final_gain, out)
        return out.rows

    @torch.inference_mode()
    def head(self, x: Tensor) -> Tensor:
        """Logits `[W, vocab]` of rows of what a call returns."""
        head = self._weights.head
        if not len(x):
            return x.new_empty(0, len(head.weight))
        if head.scale is None:
            return x @ head.weight.t()
        rounded = Scaled(torch.empty(x.shape, dtype=E4M3, device=x.device), torch.empty(len(x), device=x.device))
        self._registry.get("quant_fp8", QuantSpec(x.shape[1]))(x, rounded.rows, rounded.scale)
        logits = torch.empty(len(x), len(head.weight), dtype=self._format.rows, device=x.device)
        self._product(head, rounded, logits, deferred=False)
        return logits

    def _bind(self, block_size: int) -> None:
        config, get, fp8 = self._config, self._registry.get, self._format.is_fp8
        hidden, quant = config.hidden_size, "token" if fp8 else "none"
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self._norm_embedding = get("add_rmsnorm_quant", NormSpec(hidden, quant, embed=True))
        self._norm = get("add_rmsnorm_quant", NormSpec(hidden, quant, deferred=fp8))
        self._norm_end = get("add_rmsnorm_quant", NormSpec(hidden, "none", deferred=fp8))
        self._norm_head = get("add_rmsnorm_quant", NormSpec(config.head_dim, "none", residual=False))
        self._rope = get("rope_append", RopeSpec(*heads, block_size, self._format.kv, deferred=self._qkv_deferred))
        self._quant = get("quant_fp8", QuantSpec(config.num_heads * config.head_dim))
        self._silu = get("silu_mul_quant", SiluSpec(config.intermediate_size, quant, deferred=fp8))

    def _allocate(self, max_rows: int, device: torch.device) -> None:
        config, plain = self._config, self._format.rows
        hidden, inner = config.hidden_size, config.intermediate_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        read = E4M3 if self._format.is_fp8 else plain

        def empty(*shape: int, dtype: torch.dtype = plain) -> Tensor:
            return torch.empty(max_rows, *shape, dtype=dtype, device=device)

        self._residual, self._sum = empty(hidden), empty(hidden)
        self._x, self._x_scale = empty(hidden, dtype=read), empty(dtype=torch.float32)
        self._qkv, self._q = empty(q_width + 2 * kv_width), empty(config.num_heads, config.head_dim)
        self._mixed = empty(config.num_heads, config.head_dim)
        self._mixed8, self._mixed_scale = empty(q_width, dtype=read), empty(dtype=torch.float32)
        self._gate_up = empty(2 * inner)
        self._middle, self._middle_scale = empty(inner, dtype=read), empty(dtype=torch.float32)

    def _attention(self, layer: LayerWeights, x: Scaled, rows: Rows, cache: LayerCache, attend: Attend) -> Scaled:
        """Writes K and V of the rows, then attends: `[T, heads * D]` before the output projection."""
        count = len(x.rows)
        qkv, q, mixed = self._qkv[:count], self._q[:count], self._mixed[:count]
        self._product(layer.qkv, x, qkv, self._qkv_deferred)
        if layer.q_gain is not None and layer.k_gain is not None:
            self._normalise_heads(qkv, layer.q_gain, layer.k_gain)
        scales = {"token_scale": x.scale, "channel_scale": layer.qkv.scale} if self._qkv_deferred else {}
        self._rope(
            qkv, rows.positions, rows.slots, self._weights.cos_sin, q, cache.keys, cache.values,
            k_scale=cache.k_scale, v_scale=cache.v_scale, **scales,
        )  # fmt: skip
        attend(q, cache, mixed)
        if not self._format.is_fp8:
            return Scaled(mixed.view(count, -1), self._mixed_scale[:count])
        rounded = Scaled(self._mixed8[:count], self._mixed_scale[:count])
        self._quant(mixed.view(count, -1), rounded.rows, rounded.scale)
        return rounded

    def _normalise_heads(self, qkv: Tensor, q_gain: Tensor, k_gain: Tensor) -> None:
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k, _ = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
        for part, gain in ((q, q_gain), (k, k_gain)):
            flat = part.reshape(-1, config.head_dim).contiguous()  # with one head a view would do, to reshape
            out = torch.empty_like(flat)
            self._norm_head(flat, None, gain, config.norm_eps, out, self._x_scale)
            part.copy_(out.view(part.shape))

    def _mlp(self, layer: LayerWeights, mixed: Scaled, residual: Tensor, x: Scaled) -> Scaled:
        """Adds attention to the residual; the MLP up to its middle, `[T, I]`. Overwrites `x`."""
        count = len(residual)
        self._add_norm(self._norm, layer.output, mixed, residual, layer.mlp_gain, x)
        gate_up = self._gate_up[:count]
        self._product(layer.gate_up, x, gate_up, self._format.is_fp8)
        middle = Scaled(self._middle[:count], self._middle_scale[:count])
        scales = {"token_scale": x.scale, "channel_scale": layer.gate_up.scale} if self._format.is_fp8 else {}
        self._silu(gate_up, middle.rows, middle.scale, **scales)
        return middle

    def _add_norm(
        self, norm: Callable[..., None], matrix: Matrix, x: Scaled, residual: Tensor, gain: Tensor, out: Scaled
    ) -> None:
        """residual += x @ matrix; out = its norm."""
        total = self._sum[: len(residual)]
        self._product(matrix, x, total, self._format.is_fp8)
        scales = {"token_scale": x.scale, "channel_scale": matrix.scale} if self._format.is_fp8 else {}
        norm(total, residual, gain, self._config.norm_eps, out.rows, out.scale, **scales)

    def _product(self, matrix: Matrix, x: Scaled, out: Tensor, deferred: bool) -> None:
        """Without its scales if `deferred`."""
        if matrix.scale is None:
            torch.mm(x.rows, matrix.weight.t(), out=out)
        else:
            n, k = matrix.weight.shape
            self._gemm(GemmSpec(n, k, deferred=deferred))(x.rows, matrix.weight, x.scale, matrix.scale, out)
        if matrix.bias is not None:
            out.add_(matrix.bias)

    def _gemm(self, spec: GemmSpec) -> Callable[..., None]:
        if spec not in self._gemms:
            self._gemms[spec] = self._registry.get("gemm_fp8", spec)
        return self._gemms[spec]
