"""The tensors of multi-head latent attention in a checkpoint, as its layers take them."""

from dataclasses import dataclass

import torch

from engine.model_loader.checkpoint_weights import WeightSource
from engine.model_loader.decoder_tensors import require_shape
from models.config import LatentAttention, ModelConfig


@dataclass(frozen=True)
class LatentTensors:
    """The matrices of a layer's attention up to its output projection, float32.

    `down` `[q_rank + kv_rank + rope_dim, hidden]`: the latents of q and of what is kept, and the key that is turned;
    where q has no latent, its own rows stand for those of one, and `q_up` and `q_gain` are None. `keys`
    `[heads, nope_dim, kv_rank]` and `values` `[heads, kv_rank, value_dim]` make keys and values of latents. The parts
    of a rotary pair lie side by side.
    """

    down: torch.Tensor
    q_up: torch.Tensor | None
    q_gain: torch.Tensor | None
    kv_gain: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def latent_tensors(config: ModelConfig, source: WeightSource, prefix: str) -> LatentTensors:
    """Return those of a layer.

    Raises ConfigError for one that is missing, or of another shape than the configuration says.
    """
    assert config.latent is not None, "a model without latents"
    return _LatentReader(config, config.latent, source, f"{prefix}self_attn.").read()


class _LatentReader:
    def __init__(self, config: ModelConfig, latent: LatentAttention, source: WeightSource, prefix: str) -> None:
        self._config, self._latent, self._source, self._prefix = config, latent, source, prefix

    def read(self) -> LatentTensors:
        sizes, hidden, heads = self._latent, self._config.hidden_size, self._config.num_heads
        kept = self._paired(self._tensor("kv_a_proj_with_mqa", sizes.width, hidden), sizes.width)
        q, q_up, q_gain = "q_proj", None, None
        if sizes.q_rank:
            q_gain = self._tensor("q_a_layernorm", sizes.q_rank)
            q, q_up = "q_a_proj", self._q("q_b_proj", sizes.q_rank)
        first = self._tensor(q, sizes.q_rank, hidden) if sizes.q_rank else self._q(q, hidden)
        up = self._tensor("kv_b_proj", heads * (sizes.nope_dim + sizes.value_dim), sizes.kv_rank)
        keys, values = up.view(heads, -1, sizes.kv_rank).split([sizes.nope_dim, sizes.value_dim], 1)
        gain = self._tensor("kv_a_layernorm", sizes.kv_rank)
        return LatentTensors(torch.cat([first, kept]), q_up, q_gain, gain, keys, values.transpose(1, 2))

    def _q(self, name: str, num_in: int) -> torch.Tensor:
        width = self._latent.nope_dim + self._latent.rope_dim
        return self._paired(self._tensor(name, self._config.num_heads * width, num_in), width)

    def _paired(self, matrix: torch.Tensor, width: int) -> torch.Tensor:
        """Return rows in heads of `width`, the last `rope_dim` of each in pairs however they are stored."""
        if self._latent.is_interleaved:
            return matrix
        heads, rope_dim = matrix.view(-1, width, matrix.shape[1]), self._latent.rope_dim
        plain, turned = heads.split([width - rope_dim, rope_dim], 1)
        pairs = turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return torch.cat([plain, pairs], 1).flatten(0, 1)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        full = f"{self._prefix}{name}.weight"
        tensor = self._source.tensor(full)
        require_shape(full, tensor.shape, shape)
        return tensor
