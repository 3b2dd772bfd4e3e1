"""From a checkpoint to packed weights, with norm gains folded in."""

import torch

from checkpoint.checkpoint import Progress
from checkpoint.config import ModelConfig
from engine.decoder import DecoderWeights, LayerWeights
from engine.linear import Linear, NumberFormat
from engine.tensors import ModelTensors, layer_prefix
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
        self._config, self._format = config, number_format
        self._tensors = ModelTensors(config, source, interleaved=True)

    def layer(self, index: int) -> LayerWeights:
        tensors, prefix = self._tensors, layer_prefix(index)
        attention_gain = self._gain(prefix + "input_layernorm")
        mlp_gain = self._gain(prefix + "post_attention_layernorm")
        return LayerWeights(
            attention_gain=self._unfolded(attention_gain),
            qkv=self._format.pack(self._fold(tensors.qkv(prefix), attention_gain), tensors.qkv_bias(prefix)),
            output=self._format.pack(tensors.output(prefix)),
            mlp_gain=self._unfolded(mlp_gain),
            gate_up=self._format.pack(self._fold(tensors.gate_up(prefix), mlp_gain)),
            down=self._format.pack(tensors.down(prefix)),
            q_gain=self._head_gain(prefix, "q"),
            k_gain=self._head_gain(prefix, "k"),
        )

    def ends(self) -> tuple[torch.Tensor, torch.Tensor | None, Linear]:
        """The embedding table, the final norm's gain unless folded, and the output head."""
        embedding = self._tensors.embedding()
        head = embedding if self._config.tied_embeddings else self._tensors.head()
        gain = self._gain("model.norm")
        return embedding, self._unfolded(gain), self._format.head(self._fold(head, gain), None)

    def _gain(self, name: str) -> torch.Tensor:
        return self._tensors.gain(name) * self._config.hidden_size**0.5

    def _fold(self, weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return weight * gain if self._format.folds else weight

    def _unfolded(self, gain: torch.Tensor) -> torch.Tensor | None:
        return None if self._format.folds else gain

    def _head_gain(self, prefix: str, name: str) -> torch.Tensor | None:
        gain = self._tensors.head_gain(prefix, name)
        return None if gain is None else gain * self._config.head_dim**0.5
