"""An EAGLE3 head of one layer from the library's operations, over pages of its own.

Slot j of a sequence holds K and V of what the head makes of token j and the feature of the token before, at whose
position rope turns them; slot 0 is empty. A step of few rows is what a draft takes; K and V alone are what it takes to
read a prompt, or the tokens that were verified.

Shapes: T rows, H hidden size, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from contracts.errors import ConfigError
from engine.cuda.kv.kv_cache import DeviceCache
from engine.cuda.model.attention import decode_workspace
from engine.cuda.model.format_choice import rounds_sparingly
from engine.cuda.model.linear import (
    QuantizedLinear,
    RowBuffer,
    Scaled,
    finishing_arguments,
    parts_numel,
    rounding,
    unrounded,
)
from engine.cuda.model.matrices import Matrix, quantize_rows
from engine.cuda.model.number_formats import DeviceFormat
from engine.model.rotary_embedding import rope_frequencies
from engine.model_loader.eagle3_tensors import Eagle3Tensors
from kernels.decode_plan import skinny_parts
from kernels.registry import Registry
from kernels.specs import AttnSpec, GemmSpec, KVDtype, NormSpec, Quant, QuantSpec, RopeSpec, SiluSpec
from models.config import ModelConfig
from models.eagle3 import Eagle3Config

MAX_READ_ROWS = 2048
"""Rows that are read at once: more go one part after the other."""
_MAX_LEN = 4096  # what attention is launched for; it is right for any length
_ARGMAX_NBYTES = 1 << 20


@dataclass(frozen=True)
class DeviceHeadWeights:
    """The weights of a head.

    `aux_gains`: of all aux rows as one, or of each. The product of embedding and feature, side by side, with qkv is
    that of two matrices, of which the second has the bias. `targets` `[draft_vocab]` int64: the model's tokens.
    """

    aux_gains: tuple[Tensor, ...]
    fc: Tensor
    embedding: Tensor
    input_gain: Tensor
    feature_gain: Tensor
    embedded_qkv: Matrix
    feature_qkv: Matrix
    q_gain: Tensor | None
    k_gain: Tensor | None
    output: Matrix
    mlp_gain: Tensor
    gate_up: Matrix
    down: Matrix
    final_gain: Tensor
    head: Matrix
    targets: Tensor
    cos_sin: Tensor

    @property
    def matrices(self) -> list[Matrix]:
        return [self.embedded_qkv, self.feature_qkv, self.output, self.gate_up, self.down, self.head]


@dataclass(frozen=True)
class DeviceHeadRows:
    """The rows of a head, T of them.

    `before` `[T, H]`: the feature of the token before each, `positions`: of that; `slots`: of K and V, or -1.
    """

    before: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor


class DeviceEagle3Head:
    """A head over its cache. `max_rows`: of a step that drafts."""

    def __init__(
        self, config: Eagle3Config, weights: DeviceHeadWeights, number_format: DeviceFormat, registry: Registry,
        cache_: DeviceCache, max_rows: int, device: torch.device,
    ) -> None:  # fmt: skip
        self.config, self.weights, self._format = config, weights, number_format
        self._cache, self._device = cache_, device
        self._get = cache(registry.get)
        self._kv: KVDtype = "fp32" if number_format.kv == "fp32" else "bf16"
        self._require_kernels(registry)
        self._allocate(registry, max_rows)

    @torch.inference_mode()
    def fuse(self, aux: Tensor, out: Tensor) -> None:
        """Write the features `[T, H]` of rows of the model, `aux` `[T, fc_width]`."""
        gains, eps = self.weights.aux_gains, self.config.norm_eps
        if gains:
            parts = aux.chunk(len(gains), 1)
            normed = [F.rms_norm(part, (len(gain),), gain, eps) for part, gain in zip(parts, gains, strict=True)]
            aux = torch.cat(normed, 1)
        torch.mm(aux, self.weights.fc.t(), out=out)

    @torch.inference_mode()
    def write(self, rows: DeviceHeadRows) -> None:
        """Write K and V of rows, of any number."""
        for first in range(0, len(rows.token_ids), MAX_READ_ROWS):
            part = slice(first, first + MAX_READ_ROWS)
            some = DeviceHeadRows(rows.before[part], rows.token_ids[part], rows.positions[part], rows.slots[part])
            self._append(some)

    @torch.inference_mode()
    def step(self, rows: DeviceHeadRows, tables: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token that each row drafts, and the features for the rows behind.

        `tables` `[T, blocks]`; a row sees the slots from `starts` up to `lengths` `[T]`. The features are overwritten
        by the next step.
        """
        config, count = self.config, len(rows.token_ids)
        q = self._append(rows)
        layer, mixed = self._cache.layer(0), self._mixed[:count]
        self._attend(
            q, layer.keys, layer.values, tables, lengths, mixed, self._workspace,
            sm_scale=config.head_dim**-0.5, starts=starts, max_len=_MAX_LEN,
        )  # fmt: skip
        residual = self._residual_of(rows.before)
        return self._finish(mixed.view(count, -1), residual)

    def _finish(self, mixed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return token and feature of rows whose attention is done; `residual` is overwritten."""
        weights, count = self.weights, len(residual)
        read = self._products.as_read(weights.output, mixed, self._read)
        x = self._x.of(weights.gate_up, count)
        self._add_norm(weights.output, read, residual, weights.mlp_gain, x, rounding(weights.gate_up, count))
        gate_up, middle = self._gate_up[:count], self._middle.of(weights.down, count)
        product = self._products.unfinished(weights.gate_up, x, gate_up, adds=False)
        silu = SiluSpec(middle.rows.shape[1], rounding(weights.down, count), product.deferred)
        left = finishing_arguments(weights.gate_up, x, product)
        self._get("silu_mul_quant", silu)(gate_up, middle.rows, middle.scale, **left)
        end = self._end.of(weights.head, count)
        self._add_norm(weights.down, middle, residual, weights.final_gain, end, rounding(weights.head, count))
        features = self._normed(residual) if self.config.norm_output else residual
        return self._likeliest(end), features

    def _likeliest(self, end: Scaled) -> Tensor:
        head, count = self.weights.head, len(end.rows)
        logits = self._logits[:count]
        if head.recipe == "plain":
            unrounded(end.rows, head.weight, logits)
        else:
            self._products(head, end, logits)
        found = self._found[:count]
        self._get("argmax", QuantSpec(logits.shape[1], "none"))(logits, found, self._scratch)
        return self.weights.targets.index_select(0, found)

    def _normed(self, residual: Tensor) -> Tensor:
        """Return rows after the final norm, which is the feature that some heads go on from."""
        out = torch.empty_like(residual)
        self._norm(residual, self.weights.final_gain, Scaled(out, self._x.scale), "none")
        return out

    def _residual_of(self, before: Tensor) -> Tensor:
        residual = self._residual[: len(before)]
        if self.config.norm_before_residual:
            self._norm(before, self.weights.feature_gain, Scaled(residual, self._x.scale), "none")
        else:
            residual.copy_(before)
        return residual

    def _append(self, rows: DeviceHeadRows) -> Tensor:
        """Write K and V of rows; return their queries `[T, heads, D]`."""
        config, weights, count = self.config, self.weights, len(rows.token_ids)
        qkv, parts = self._qkv_of(rows)
        q, layer = self._q[:count], self._cache.layer(0)
        spec = RopeSpec(
            config.num_heads, config.num_kv_heads, config.head_dim, self._block_size, self._kv, parts=parts,
            biased=weights.feature_qkv.bias is not None, normed=weights.q_gain is not None,
        )  # fmt: skip
        self._get("rope_append", spec)(
            qkv, rows.positions, rows.slots, weights.cos_sin, q, layer.keys, layer.values,
            bias=weights.feature_qkv.bias, q_gain=weights.q_gain, k_gain=weights.k_gain, eps=config.norm_eps,
        )  # fmt: skip
        return q

    def _qkv_of(self, rows: DeviceHeadRows) -> tuple[Tensor, int]:
        """Return the product with qkv, and in how many parts it is left to be added up."""
        weights, count, eps = self.weights, len(rows.token_ids), self.config.norm_eps
        embedded = self._embedded.of(weights.embedded_qkv, count)
        spec = NormSpec(self.config.hidden_size, rounding(weights.embedded_qkv, count), embed=True, residual=False)
        self._get("add_rmsnorm_quant", spec)(
            weights.embedding, None, weights.input_gain, eps, embedded.rows, embedded.scale, ids=rows.token_ids
        )
        features = self._x.of(weights.feature_qkv, count)
        self._norm(rows.before, weights.feature_gain, features, rounding(weights.feature_qkv, count))
        (n, k), halves = weights.feature_qkv.shape, ((weights.embedded_qkv, embedded), (weights.feature_qkv, features))
        parts = skinny_parts(count, n, k) if weights.feature_qkv.recipe == "row" else None
        if parts is not None and parts > 1:
            room = self._parts[: 2 * parts * count * n].view(2, parts, count, n)
            product = self._get("gemm_fp8", GemmSpec(n, k, parts=parts, skinny=True))
            for (matrix, x), out in zip(halves, room, strict=True):
                product(x.rows, matrix.weight, x.scale, matrix.scale, out)
            return room.view(2 * parts, count, n), 2 * parts
        outs = self._qkv[:, :count]
        for (matrix, x), out in zip(halves, outs, strict=True):
            self._products(matrix, x, out)
        return outs[0].add_(outs[1]), 1

    def _norm(self, x: Tensor, gain: Tensor, out: Scaled, quant: Quant) -> None:
        spec = NormSpec(self.config.hidden_size, quant, residual=False)
        self._get("add_rmsnorm_quant", spec)(x, None, gain, self.config.norm_eps, out.rows, out.scale)

    def _add_norm(self, matrix: Matrix, x: Scaled, residual: Tensor, gain: Tensor, out: Scaled, quant: Quant) -> None:
        """residual += x @ matrix; out = its norm."""
        product = self._products.unfinished(matrix, x, self._sum[: len(residual)])
        spec = NormSpec(self.config.hidden_size, quant, product.parts, product.deferred, biased=matrix.bias is not None)
        self._get("add_rmsnorm_quant", spec)(
            product.out, residual, gain, self.config.norm_eps, out.rows, out.scale,
            **finishing_arguments(matrix, x, product),
        )  # fmt: skip

    def _require_kernels(self, registry: Registry) -> None:
        """Raise ConfigError where no kernel attends from a given slot on, or the reference would be captured."""
        config = self.config
        self._block_size = self._cache.layout.block_size
        spec = AttnSpec(config.num_heads, config.num_kv_heads, config.head_dim, self._block_size, self._kv)
        choice = registry.resolve("attn_decode", spec)
        is_captured = self._device.type == "cuda" and self._kv != "fp32"
        if choice.impl.name == "flashinfer" or (is_captured and choice.impl.name == "reference"):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.rejected)
            raise ConfigError(f"the head's head_dim is {config.head_dim}, and no attention kernel runs ({reasons})")
        self._attend: Callable[..., None] = registry.get("attn_decode", spec)

    def _allocate(self, registry: Registry, max_rows: int) -> None:
        config, weights, rows_type, device = self.config, self.weights, self._format.rows, self._device
        hidden, inner, q_width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        width = q_width + 2 * config.num_kv_heads * config.head_dim
        read_rows = max(max_rows, MAX_READ_ROWS)
        empty = partial(torch.empty, dtype=rows_type, device=device)
        self._products = QuantizedLinear(registry, weights.matrices, read_rows, device)
        self._embedded = RowBuffer([weights.embedded_qkv], read_rows, hidden, rows_type, device)
        self._x = RowBuffer([weights.feature_qkv, weights.gate_up], read_rows, hidden, rows_type, device)
        self._read = RowBuffer([weights.output], max_rows, q_width, None, device)
        self._middle = RowBuffer([weights.down], max_rows, inner, rows_type, device)
        self._end = RowBuffer([weights.head], max_rows, hidden, rows_type, device)
        self._qkv, self._q = empty(2, read_rows, width), empty(read_rows, config.num_heads, config.head_dim)
        self._parts = torch.empty(2 * parts_numel(weights.feature_qkv, read_rows), device=device)
        self._mixed = empty(max_rows, config.num_heads, config.head_dim)
        self._residual, self._sum = empty(max_rows, hidden), empty(max_rows, hidden)
        self._gate_up = empty(max_rows, 2 * inner)
        logits_type = torch.float32 if weights.head.recipe == "plain" else rows_type
        self._logits = torch.empty(max_rows, weights.head.shape[0], dtype=logits_type, device=device)
        # Zeros: they are looked up while kernels are compiled, and not launched.
        self._found = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._scratch = torch.zeros(_ARGMAX_NBYTES, dtype=torch.uint8, device=device)
        self._workspace = decode_workspace(config, max_rows, device)


def load_device_head(
    tensors: Eagle3Tensors, number_format: DeviceFormat, target: ModelConfig, embedding: Tensor, max_model_len: int
) -> DeviceHeadWeights:
    """Return the weights of a head, its matrices in e4m3 where the model's are rounded so.

    `embedding`: the model's.
    """
    return _HeadLoader(tensors, number_format, target, embedding.device).weights(embedding, max_model_len)


class _HeadLoader:
    def __init__(
        self, tensors: Eagle3Tensors, number_format: DeviceFormat, target: ModelConfig, device: torch.device
    ) -> None:
        self._tensors, self._format, self._device = tensors, number_format, device
        self._rounds = number_format.is_fp8 and not rounds_sparingly(target)

    def weights(self, embedding: Tensor, max_model_len: int) -> DeviceHeadWeights:
        tensors, config = self._tensors, self._tensors.config
        prefix, own = "layers.0.", self._tensors.own_embedding()
        embedded_qkv, feature_qkv = self._qkv()
        gate, up = (tensors.tensor(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up"))
        q_gain, k_gain = tensors.head_gain(0, "q"), tensors.head_gain(0, "k")
        turns = rope_frequencies(config, max_model_len)
        return DeviceHeadWeights(
            aux_gains=self._aux_gains(),
            fc=self._rows(tensors.tensor("fc.weight")),
            embedding=embedding if own is None else self._rows(own),
            input_gain=self._rows(tensors.gain(prefix + "input_layernorm")),
            feature_gain=self._rows(tensors.gain(prefix + "hidden_norm")),
            embedded_qkv=embedded_qkv,
            feature_qkv=feature_qkv,
            q_gain=None if q_gain is None else self._rows(q_gain),
            k_gain=None if k_gain is None else self._rows(k_gain),
            output=self._matrix(*tensors.projection(0, "o")),
            mlp_gain=self._rows(tensors.gain(prefix + "post_attention_layernorm")),
            gate_up=self._matrix(torch.cat([gate, up])),
            down=self._matrix(tensors.tensor(prefix + "mlp.down_proj.weight")),
            final_gain=self._rows(tensors.gain("norm")),
            head=self._matrix(tensors.output()),
            targets=torch.from_numpy(tensors.targets()).to(self._device, torch.int64),
            cos_sin=torch.cat([turns.real, turns.imag], 1).contiguous().to(self._device),
        )

    def _aux_gains(self) -> tuple[Tensor, ...]:
        tensors, config = self._tensors, self._tensors.config
        if config.norm_before_fc:
            return (self._rows(tensors.gain("input_norm")),)
        if config.fc_norm:
            return tuple(self._rows(tensors.gain(f"fc_norm.{index}")) for index in range(len(config.aux_layers)))
        return ()

    def _qkv(self) -> tuple[Matrix, Matrix]:
        """Return what multiplies the embedding, and what the feature, with the bias."""
        parts = [self._tensors.projection(0, name) for name in "qkv"]
        whole = torch.cat([weight for weight, _ in parts])
        biases = [bias for _, bias in parts if bias is not None]
        embedded, feature = whole.chunk(2, 1)
        return self._matrix(embedded), self._matrix(feature, torch.cat(biases) if biases else None)

    def _matrix(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        there = None if bias is None else self._rows(bias)
        if not self._rounds:
            return Matrix(self._rows(weight).contiguous(), bias=there)
        rounded = quantize_rows(weight.to(self._device).float())
        return Matrix(rounded.weight.contiguous(), rounded.scale, bias=there)

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device).to(self._format.rows)
