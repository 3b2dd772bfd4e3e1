"""The tensors of a decoder in a checkpoint, by their part in it.

Fused, and of the shapes that its config.json says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from checkpoint.quantization import Scheme
from contracts.errors import ConfigError
from engine.model_loader.checkpoint_weights import WeightSource
from engine.model_loader.quantized_matrices import Fp8Matrix, StoredMatrix, joined
from kernels.layouts import gate_up_halves
from kernels.reference.quant import unpack_e2m1
from models.config import Experts, ExpertScoring, ModelConfig

_Q, _K, _V = (f"self_attn.{name}_proj" for name in "qkv")
PARTS = {
    "qkv": (_Q, _K, _V),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "shared_gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_down": ("mlp.shared_expert.down_proj",),
    "head": ("lm_head",),
    "score": ("score",),
}
"""The modules of a layer whose matrices are one product; the head for tokens, or for labels, which has no prefix."""


ExpertMatrix = torch.Tensor | Fp8Matrix


@dataclass(frozen=True)
class Expert:
    """The matrices of an expert, gate and up as one, and down, `[n, k]` each.

    As they are stored if they are FP8 with scales by row, else widened; biases as gpt-oss has them, or none.
    """

    gate_up: ExpertMatrix
    down: ExpertMatrix
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Mxfp4:
    """Several matrices (Open Compute Project 2023).

    `values` `[count, n, k / 32, 16]`, two e2m1 a byte, the low nibble first; `scales` `[count, n, k / 32]`, exponents
    of two, 127 more than they are.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def dense(self, index: int) -> torch.Tensor:
        """One of them, `[n, k]` float32."""
        return torch.ldexp(unpack_e2m1(self.values[index]), self.scales[index, ..., None].int() - 127).flatten(-2)


class ModelTensors:
    """`prefix` is that of a layer, see `layer_prefix`.

    `interleaved`: how rows of q and k are wanted, the parts of a rotary pair side by side, or in halves.
    `num_head_rows`: of the output head, if not one for each token.

    All methods raise ConfigError for a tensor that is missing or has another shape than the configuration says.
    """

    def __init__(
        self, config: ModelConfig, source: WeightSource, interleaved: bool, num_head_rows: int | None = None
    ) -> None:
        self._config, self._source, self._interleaved = config, source, interleaved
        hidden = config.hidden_size
        self._shapes = layer_shapes(config) | {"lm_head": (num_head_rows or config.vocab_size, hidden)}
        self._shapes["score"] = (config.num_labels, hidden)
        if config.experts is not None:
            inner = config.experts.shared_size or config.experts.intermediate_size
            self._shapes |= {f"mlp.shared_expert.{name}_proj": (inner, hidden) for name in ("gate", "up")}
            self._shapes |= {"mlp.shared_expert.down_proj": (hidden, inner)}

    def embedding(self) -> torch.Tensor:
        return self._tensor("model.embed_tokens.weight", self._config.vocab_size, self._config.hidden_size)

    def fused(self, prefix: str, part: str) -> torch.Tensor:
        """A part of PARTS as one matrix, `[n, k]`; widened if it is quantized."""
        weights = [self._weight(prefix, module) for module in PARTS[part]]
        return torch.cat(weights) if len(weights) > 1 else weights[0]

    def output_gate(self, prefix: str) -> torch.Tensor:
        """Return what gives the gate of attention's output, `[heads * head_dim, hidden]`; it is stored with q."""
        return self._query_rows(prefix)[:, self._config.head_dim :].flatten(0, 1)

    def stored(self, prefix: str, part: str) -> list[StoredMatrix]:
        """The matrices of a part as the checkpoint holds them. Empty unless all are quantized."""
        if self._source.quantized is None:
            return []
        found = {module: self._source.quantized.matrix(prefix + module) for module in PARTS[part]}
        matrices = {module: matrix for module, matrix in found.items() if matrix is not None}
        for module, matrix in matrices.items():
            require_shape(f"{prefix}{module}.weight", matrix.shape, self._shapes[module])
        if len(matrices) < len(found):
            return []
        return [self._rotated_rows(matrix) if module in (_Q, _K) else matrix for module, matrix in matrices.items()]

    def kv_scales(self, prefix: str) -> tuple[float, float] | None:
        """What K and V are divided by before they are rounded to e4m3, if the checkpoint says."""
        if self._source.quantized is None:
            return None
        k, v = (self._source.quantized.kv_scale(prefix, name) for name in "kv")
        return None if k is None or v is None else (k, v)

    def matrix(self, module: str, n: int, k: int) -> torch.Tensor:
        """Return a matrix that no part has, `[n, k]`; widened if it is quantized."""
        return self._tensor(f"{module}.weight", n, k)

    def gain(self, name: str) -> torch.Tensor:
        """Return the gain of a norm over the hidden size."""
        return self._tensor(f"{name}.weight", self._config.hidden_size)

    def qkv_bias(self, prefix: str) -> torch.Tensor | None:
        if not self._config.qkv_bias:
            return None
        return torch.cat([self._bias(prefix, module) for module in PARTS["qkv"]])

    def head_gain(self, index: int, name: str) -> torch.Tensor | None:
        """Return the gain of the norm over each head of a layer's q or k, if there is one."""
        if self._config.plain_qk_norm and index not in self._config.no_rope_layers:
            return torch.ones(self._config.head_dim)
        if not self._config.qk_norm:
            return None
        stored = f"{layer_prefix(index)}self_attn.{name}_norm.weight"
        return self._rotary_order(self._tensor(stored, self._head_gain_width(name)))

    def _head_gain_width(self, name: str) -> int:
        if not self._config.joint_qk_norm:
            return self._config.head_dim
        return self._shapes[_Q if name == "q" else _K][0]

    def router(self, prefix: str) -> torch.Tensor:
        """Return what scores the experts of a layer, one row each."""
        module = "router" if self._experts.as_gpt_oss or self._experts.as_llama4 else "gate"
        return self._tensor(f"{prefix}mlp.{module}.weight", self._experts.count, self._config.hidden_size)

    def shared_gate(self, prefix: str) -> torch.Tensor:
        """Return what scores the shared expert of a layer, one row; GGUF files have it as a vector."""
        name = prefix + "mlp.shared_expert_gate.weight"
        row = self._source.tensor(name)
        row = row[None] if row.dim() == 1 else row
        require_shape(name, row.shape, (1, self._config.hidden_size))
        return row

    def choice_bias(self, prefix: str) -> torch.Tensor | None:
        """Return what is added to experts' scores where they are chosen, if there is such."""
        if self._experts.scoring is not ExpertScoring.SIGMOID:
            return None
        return self._tensor(prefix + "mlp.gate.e_score_correction_bias", self._experts.count)

    def router_bias(self, prefix: str) -> torch.Tensor | None:
        return self._tensor(prefix + "mlp.router.bias", self._experts.count) if self._experts.as_gpt_oss else None

    def experts(self, prefix: str) -> Iterator[Expert]:
        """One after the other; what is widened is float32, unless opened for a device."""
        if self._experts.as_gpt_oss:
            yield from self._stacked_experts(prefix)
            return
        if self._experts.as_llama4 and not self._has_expert_modules(prefix):
            yield from self._transposed_experts(prefix)
            return
        hidden, inner = self._config.hidden_size, self._experts.intermediate_size
        for number in range(self._experts.count):
            gate, up, down = (f"{prefix}mlp.experts.{number}.{name}_proj" for name in ("gate", "up", "down"))
            yield Expert(self._expert([gate, up], inner, hidden), self._expert([down], hidden, inner))

    def _has_expert_modules(self, prefix: str) -> bool:
        quantized = self._source.quantized
        return quantized is not None and quantized.has_weight(f"{prefix}mlp.experts.0.gate_proj")

    def _expert(self, modules: Sequence[str], n: int, k: int) -> ExpertMatrix:
        """Matrices of one shape, one below the other."""
        stored = self._stored_rows(modules)
        if len(stored) < len(modules):
            return torch.cat([self._tensor(f"{module}.weight", n, k) for module in modules])
        for module, matrix in zip(modules, stored, strict=True):
            require_shape(f"{module}.weight", matrix.shape, (n, k))
        return joined(stored)

    def _stored_rows(self, modules: Sequence[str]) -> list[Fp8Matrix]:
        """Return the rows of those that are FP8 with scales by row."""
        quantized = self._source.quantized
        if quantized is None or quantized.quantization.scheme is not Scheme.FP8_ROWS:
            return []
        return [matrix for module in modules if isinstance(matrix := quantized.matrix(module), Fp8Matrix)]

    def _stacked_experts(self, prefix: str) -> Iterator[Expert]:
        """Yield the experts of gpt-oss.

        It has gate and up in turn, row by row, all experts in one tensor, transposed unless it is MXFP4.
        """
        count, hidden, inner = self._experts.count, self._config.hidden_size, self._experts.intermediate_size
        gate_up_biases, down_biases = self.expert_biases(prefix)
        assert gate_up_biases is not None and down_biases is not None
        if self._experts.is_mxfp4:
            gate_ups, downs = (map(part.dense, range(count)) for part in self.mxfp4_experts(prefix))
        else:
            stem = prefix + "mlp.experts."
            gate_ups = gate_up_halves(self._tensor(stem + "gate_up_proj", count, hidden, 2 * inner).transpose(1, 2))
            downs = self._tensor(stem + "down_proj", count, inner, hidden).transpose(1, 2).contiguous()
        yield from map(Expert, gate_ups, downs, gate_up_biases, down_biases)

    def _transposed_experts(self, prefix: str) -> Iterator[Expert]:
        """Llama 4 has all experts in one tensor, transposed, gate before up."""
        hidden, inner = self._config.hidden_size, self._experts.intermediate_size
        gate_ups = self._transposed(prefix + "mlp.experts.gate_up_proj", hidden, 2 * inner)
        downs = self._transposed(prefix + "mlp.experts.down_proj", inner, hidden)
        yield from map(Expert, gate_ups, downs)

    def _transposed(self, name: str, k: int, n: int) -> Iterator[ExpertMatrix]:
        count, quantized = self._experts.count, self._source.quantized
        stored = None if quantized is None else quantized.experts(name)
        if stored is None:
            return (matrix.t().contiguous() for matrix in self._tensor(name, count, k, n))
        require_shape(name, stored.weight.shape, (count, k, n))
        return map(stored.matrix, range(count))

    def expert_biases(self, prefix: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the biases of gate and up, and of down, if there are such.

        `[experts, 2 * inner]` and `[experts, hidden]`.
        """
        if not self._experts.as_gpt_oss:
            return None, None
        count, hidden, inner = self._experts.count, self._config.hidden_size, self._experts.intermediate_size
        gate_up = self._tensor(prefix + "mlp.experts.gate_up_proj_bias", count, 2 * inner)
        return gate_up_halves(gate_up, -1), self._tensor(prefix + "mlp.experts.down_proj_bias", count, hidden)

    def mxfp4_experts(self, prefix: str) -> tuple[Mxfp4, Mxfp4]:
        """Gate and up as one matrix, and down, of all experts."""
        hidden, inner = self._config.hidden_size, self._experts.intermediate_size
        gate_up = self._mxfp4(prefix + "mlp.experts.gate_up_proj", 2 * inner, hidden)
        halved = Mxfp4(gate_up_halves(gate_up.values, -3), gate_up_halves(gate_up.scales))
        return halved, self._mxfp4(prefix + "mlp.experts.down_proj", hidden, inner)

    def _mxfp4(self, name: str, rows: int, columns: int) -> Mxfp4:
        shape = (self._experts.count, rows, columns // 32)
        return Mxfp4(self._tensor(name + "_blocks", *shape, 16), self._tensor(name + "_scales", *shape))

    def output_bias(self, prefix: str) -> torch.Tensor | None:
        """Return the bias of attention's output."""
        if not self._config.output_bias:
            return None
        return self._tensor(prefix + "self_attn.o_proj.bias", self._config.hidden_size)

    def sinks(self, prefix: str) -> torch.Tensor | None:
        """A logit for each head."""
        return self._tensor(prefix + "self_attn.sinks", self._config.num_heads) if self._config.sinks else None

    @property
    def _experts(self) -> Experts:
        assert self._config.experts is not None, "this model has none"
        return self._config.experts

    def _query_rows(self, prefix: str) -> torch.Tensor:
        """Return the rows of q and, behind them in each head, of its gate.

        They are `[heads, 2 * head_dim, hidden]`.
        """
        heads, width, hidden = self._config.num_heads, 2 * self._config.head_dim, self._config.hidden_size
        return self._tensor(f"{prefix}{_Q}.weight", heads * width, hidden).view(heads, width, hidden)

    def _weight(self, prefix: str, module: str) -> torch.Tensor:
        if module == _Q and self._config.output_gate:
            return self._rotary_order(self._query_rows(prefix)[:, : self._config.head_dim].flatten(0, 1))
        tensor = self._tensor(f"{prefix}{module}.weight", *self._shapes[module])
        return self._rotary_order(tensor) if module in (_Q, _K) else tensor

    def _bias(self, prefix: str, module: str) -> torch.Tensor:
        tensor = self._tensor(f"{prefix}{module}.bias", self._shapes[module][0])
        return self._rotary_order(tensor) if module in (_Q, _K) else tensor

    def _rotated_rows(self, matrix: StoredMatrix) -> StoredMatrix:
        if self._interleaved == self._source.interleaved:
            return matrix
        assert self._config.rotary_width == self._config.head_dim, "no quantized matrix is turned in part"
        assert isinstance(matrix, Fp8Matrix) and not matrix.is_blocks, "no other is opened with its pairs interleaved"
        return replace(matrix, weight=self._rotary_order(matrix.weight), scale=self._rotary_order(matrix.scale))

    def _rotary_order(self, tensor: torch.Tensor) -> torch.Tensor:
        return rotary_order(tensor, self._config, self._source.interleaved, self._interleaved)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._source.tensor(name)
        require_shape(name, tensor.shape, shape)
        return tensor


def require_shape(name: str, found: Sequence[int], shape: Sequence[int]) -> None:
    """Raise ConfigError for a tensor of another shape than the configuration says."""
    if tuple(found) != tuple(shape):
        raise ConfigError(f"the tensor '{name}' is {list(found)}; its configuration says {list(shape)}")


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the modules of attention and of an MLP without experts, with the shapes of their matrices."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mixed_width = q_width if config.latent is None else config.num_heads * config.latent.value_dim
    return {
        _Q: (q_width, hidden),
        _K: (kv_width, hidden),
        _V: (kv_width, hidden),
        "self_attn.o_proj": (hidden, mixed_width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def rotary_order(
    tensor: torch.Tensor, config: ModelConfig, is_interleaved: bool, wants_interleaved: bool
) -> torch.Tensor:
    """Bring rows of each head from pairs (x0, y0, x1, y1, ..) to halves (x0, x1, .., y0, y1, ..), or back.

    Rows that are not turned come behind the others in a file, and are taken for pairs as they follow.
    """
    head_dim, width = config.head_dim, config.rotary_width
    if wants_interleaved == is_interleaved and (wants_interleaved or width == head_dim):
        return tensor
    heads = tensor.view(-1, head_dim, *tensor.shape[1:])
    if not is_interleaved:
        heads = torch.cat([_exchanged(heads[:, :width], 2, width // 2), heads[:, width:]], 1)
    if not wants_interleaved:
        heads = _exchanged(heads, head_dim // 2, 2)
    return heads.reshape(tensor.shape)


def _exchanged(heads: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """`[heads, first * second, ..]` -> `[heads, second * first, ..]`, the two exchanged."""
    return heads.reshape(len(heads), first, second, *heads.shape[2:]).transpose(1, 2).flatten(1, 2)


def widened(matrix: ExpertMatrix) -> torch.Tensor:
    return matrix.dense() if isinstance(matrix, Fp8Matrix) else matrix


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."
