"""The model that a head drafts for, as its training needs it.

It computes whole sequences at once, or one token after the other. Plain torch and the operations of `kernels`, so that
it runs on a CPU and on a GPU. B sequences of T tokens, H columns, N heads, K of them for keys and values, of D columns.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint import Checkpoint
from contracts.errors import ConfigError
from engine.model.rotary_embedding import rope_frequencies
from engine.model_loader.checkpoint_weights import open_weights
from engine.model_loader.decoder_tensors import ModelTensors, layer_prefix
from kernels.caps import detect
from kernels.catalog import registry
from kernels.specs import AttnSpec, RopeSpec
from kernels.workspace import decode_workspace_nbytes
from models.config import ModelConfig, Multipliers, NormPlacement
from models.eagle3 import default_aux_layers

PAGE = 64


@dataclass(frozen=True)
class TargetLayer:
    """The matrices of a layer, `[n, k]`, q, k and v in one, gate and up in one; rows of q and k in halves."""

    attention_gain: Tensor
    qkv: Tensor
    output: Tensor
    mlp_gain: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class TargetRows:
    """What the target computed of whole sequences.

    `aux` `[B, T, 3 H]`, the inputs of the aux layers side by side; `final` `[B, T, H]`, what the output head reads.
    """

    aux: Tensor
    final: Tensor


class TargetModel:
    """A Llama: norms, rotary attention with shared KV heads, a gated MLP."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        # As a worker that serves it whole: LongRoPE has factors by the longest context.
        self.config = config = checkpoint.config.for_context(checkpoint.config.max_model_len)
        _refuse_others(config)
        tensors = ModelTensors(config, open_weights(checkpoint), interleaved=False)
        self.device, self.dtype = device, dtype

        def there(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype).contiguous()

        self.embedding = there(tensors.embedding())
        self.head = self.embedding if config.tied_embeddings else there(tensors.fused("", "head"))
        self.final_gain = there(tensors.gain("model.norm"))
        self.layers = [
            TargetLayer(
                attention_gain=there(tensors.gain(prefix + "input_layernorm")),
                qkv=there(tensors.fused(prefix, "qkv")),
                output=there(tensors.fused(prefix, "output")),
                mlp_gain=there(tensors.gain(prefix + "post_attention_layernorm")),
                gate_up=there(tensors.fused(prefix, "gate_up")),
                down=there(tensors.fused(prefix, "down")),
            )
            for prefix in map(layer_prefix, range(config.num_layers))
        ]
        self.aux_layers = default_aux_layers(config.num_layers)

    @torch.no_grad()
    def rows(self, tokens: Tensor) -> TargetRows:
        """Compute sequences `[B, T]` from their beginning; what pads their ends harms none before it."""
        config = self.config
        cos, sin = self._rotations(tokens.shape[1])
        x, aux = self.embedding[tokens], []
        for index, layer in enumerate(self.layers):
            aux += [x] * self.aux_layers.count(index)
            q, k, v = self._heads(F.linear(self._norm(x, layer.attention_gain), layer.qkv))
            q, k = (rotate_halves(part.transpose(1, 2), cos, sin) for part in (q, k))
            mixed = F.scaled_dot_product_attention(
                q, k, v.transpose(1, 2), is_causal=True, enable_gqa=config.num_heads != config.num_kv_heads
            )
            x = self._rest(layer, x, mixed.transpose(1, 2).flatten(2))
        return TargetRows(torch.cat(aux, -1), self._norm(x, self.final_gain))

    def logits(self, final: Tensor) -> Tensor:
        """Return the logits `[.., vocab]` of rows that `rows` calls final."""
        return F.linear(final, self.head)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[B, T, (N + 2 K) D]` to q `[B, T, N, D]`, k and v `[B, T, K, D]`."""
        config = self.config
        parts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = qkv.unflatten(-1, (sum(parts), config.head_dim)).split(parts, -2)
        return q, k, v

    def _rest(self, layer: TargetLayer, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output; `mixed` is its attention before the output projection."""
        x = x + F.linear(mixed, layer.output)
        gate, up = F.linear(self._norm(x, layer.mlp_gain), layer.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), gain, self.config.norm_eps)

    def _rotations(self, num_positions: int) -> tuple[Tensor, Tensor]:
        turns = rope_frequencies(self.config, num_positions).to(self.device)
        return turns.real.to(self.dtype), turns.imag.to(self.dtype)


class TargetDecoder:
    """The same model, one token of each of `num_slots` sequences a step.

    Each has a cache of `max_len` tokens.
    """

    def __init__(self, model: TargetModel, num_slots: int, max_len: int) -> None:
        config, device = model.config, model.device
        self._model, self._max_len = model, max_len
        pages = math.ceil(max_len / PAGE)
        kind = "fp32" if model.dtype is torch.float32 else "bf16"
        shape = (config.num_layers, num_slots * pages, config.num_kv_heads, PAGE, config.head_dim)
        self._keys, self._values = (torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2))
        self._tables = torch.arange(num_slots * pages, dtype=torch.int32, device=device).view(num_slots, pages)
        self._firsts = torch.arange(num_slots, device=device) * pages * PAGE
        turns = rope_frequencies(config, max_len)
        self._cos_sin = torch.cat([turns.real, turns.imag], 1).contiguous().to(device)
        nbytes = decode_workspace_nbytes(num_slots, config.num_kv_heads, 16, config.head_dim)
        self._workspace = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        kernels = registry(detect(device.type))
        q_heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._append = kernels.get("rope_append", RopeSpec(q_heads, kv_heads, dim, PAGE, kv=kind))
        self._attend = kernels.get("attn_decode", AttnSpec(q_heads, kv_heads, dim, PAGE, kind))

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits `[slots, vocab]` after tokens `[slots]` at `positions` `[slots]` int32."""
        model, config = self._model, self._model.config
        x = model.embedding[tokens]
        slots = (self._firsts + positions).to(torch.int32)
        lengths = positions + 1
        width = (config.num_heads, config.head_dim)
        for index, layer in enumerate(model.layers):
            qkv = F.linear(model._norm(x, layer.attention_gain), layer.qkv)
            q, mixed = qkv.new_empty(len(x), *width), qkv.new_empty(len(x), *width)
            keys, values = self._keys[index], self._values[index]
            self._append(qkv, positions, slots, self._cos_sin, q, keys, values)
            self._attend(
                q, keys, values, self._tables, lengths, mixed, self._workspace, sm_scale=config.head_dim**-0.5,
                max_len=self._max_len,
            )  # fmt: skip
            x = model._rest(layer, x, mixed.flatten(1))
        return model.logits(model._norm(x, model.final_gain))


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (x[i], x[i + D / 2]) of `[.., T, D]`; `cos` and `sin` `[T, D / 2]` (Su et al. 2021)."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _refuse_others(config: ModelConfig) -> None:
    """Raise ConfigError for a model that is computed otherwise."""
    others = {
        "experts": config.experts is not None,
        "biases": config.qkv_bias or config.output_bias,
        "norms of q and k": config.qk_norm or config.plain_qk_norm,
        "sinks or windows": config.sinks or bool(config.windowed_layers),
        "layers without rope": bool(config.no_rope_layers),
        "rope of a part of each head": config.rotary_width != config.head_dim,
        "norms after attention and MLP": config.norms is not NormPlacement.BEFORE,
        "multipliers": config.multipliers != Multipliers(),
    }
    if found := [name for name, is_there in others.items() if is_there]:
        raise ConfigError(f"heads for models with {found[0]} cannot be trained here; only for plain Llamas")
