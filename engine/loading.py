"""From a checkpoint to packed weights: fusing, folding norm gains, and interleaving rotary rows."""

import torch

from checkpoint.checkpoint import Progress
from checkpoint.config import ModelConfig
from contracts.errors import ConfigError
from engine.decoder import DecoderWeights, LayerWeights
from engine.linear import Linear, NumberFormat
from engine.weights import WeightSource


def load_weights(
    config: ModelConfig, source: WeightSource, number_format: NumberFormat, progress: Progress
) -> DecoderWeights:
    """Raises ConfigError for a tensor that is missing or has another shape than the configuration says."""
    loader = _Loader(config, source, number_format)
    layers = []
    for index in range(config.num_layers):
        progress("load", index, config.num_layers)
        layers.append(loader.layer(index))
    embedding, final_gain, head = loader.ends()
    progress("load", config.num_layers, config.num_layers)
    return DecoderWeights(embedding, tuple(layers), final_gain, head)


class _Loader:
    def __init__(self, config: ModelConfig, source: WeightSource, number_format: NumberFormat) -> None:
        self._config, self._source, self._format = config, source, number_format
        self._q_width = config.num_heads * config.head_dim
        self._kv_width = config.num_kv_heads * config.head_dim

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        attention_gain = self._gain(prefix + "input_layernorm.weight")
        mlp_gain = self._gain(prefix + "post_attention_layernorm.weight")
        gate_up = [self._tensor(prefix + f"mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]
        return LayerWeights(
            attention_gain=self._unfolded(attention_gain),
            qkv=self._format.pack(self._fold(self._qkv(prefix), attention_gain), self._bias(prefix)),
            output=self._format.pack(self._tensor(prefix + "self_attn.o_proj.weight", hidden, self._q_width)),
            mlp_gain=self._unfolded(mlp_gain),
            gate_up=self._format.pack(self._fold(torch.cat(gate_up), mlp_gain)),
            down=self._format.pack(self._tensor(prefix + "mlp.down_proj.weight", hidden, inner)),
            q_gain=self._head_gain(prefix + "self_attn.q_norm.weight"),
            k_gain=self._head_gain(prefix + "self_attn.k_norm.weight"),
        )

    def ends(self) -> tuple[torch.Tensor, torch.Tensor | None, Linear]:
        """The embedding table, the final norm's gain unless folded, and the output head."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        embedding = self._tensor("model.embed_tokens.weight", *shape)
        head = embedding if self._config.tied_embeddings else self._tensor("lm_head.weight", *shape)
        gain = self._gain("model.norm.weight")
        return embedding, self._unfolded(gain), self._format.head(self._fold(head, gain), None)

    def _qkv(self, prefix: str) -> torch.Tensor:
        return torch.cat([self._projection(prefix, name, self._config.hidden_size) for name in "qkv"])

    def _bias(self, prefix: str) -> torch.Tensor | None:
        if not self._config.qkv_bias:
            return None
        return torch.cat([self._projection(prefix, name) for name in "qkv"])

    def _projection(self, prefix: str, name: str, *columns: int) -> torch.Tensor:
        """The weight of q, k or v, or without `columns` its bias."""
        rows = self._q_width if name == "q" else self._kv_width
        tensor = self._tensor(f"{prefix}self_attn.{name}_proj.{'weight' if columns else 'bias'}", rows, *columns)
        return tensor if name == "v" or self._source.interleaved else self._interleave(tensor)

    def _interleave(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of each head from halves (x0 .. x31, y0 .. y31) to pairs (x0, y0, x1, y1, ..)."""
        halves = tensor.view(-1, 2, self._config.head_dim // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)

    def _gain(self, name: str) -> torch.Tensor:
        return self._tensor(name, self._config.hidden_size) * self._config.hidden_size**0.5

    def _fold(self, weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return weight * gain if self._format.folds else weight

    def _unfolded(self, gain: torch.Tensor) -> torch.Tensor | None:
        return None if self._format.folds else gain

    def _head_gain(self, name: str) -> torch.Tensor | None:
        if not self._config.qk_norm:
            return None
        gain = self._tensor(name, self._config.head_dim)
        return (gain if self._source.interleaved else self._interleave(gain)) * self._config.head_dim**0.5

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._source.tensor(name)
        if tensor.shape != shape:
            raise ConfigError(f"the tensor '{name}' is {list(tensor.shape)}; its configuration says {list(shape)}")
        return tensor
