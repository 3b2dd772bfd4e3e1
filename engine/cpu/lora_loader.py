"""The loader of LoRA adapters for the CPU's decoder.

They are fused as its matrices are, with norm gains folded in.
"""

from collections.abc import Mapping, Sequence

import torch

from checkpoint import Checkpoint
from checkpoint.lora import open_lora
from contracts.errors import ConfigError
from contracts.request import AdapterRef
from engine.adapters import LoadAdapter, LoadedAdapter
from engine.cpu.linear import NumberFormat
from engine.cpu.lora import CpuLora, LoraPair
from engine.cpu.weight_loader import CpuWeightLoader
from engine.model_loader.checkpoint_weights import WeightSource
from engine.model_loader.decoder_tensors import PARTS, layer_shapes
from engine.model_loader.lora_matrices import LoraMatrices, LoraReader
from engine.settings import EngineSettings
from models.config import ModelConfig
from models.registry import family_of

_FUSED = ("qkv", "output", "gate_up", "down")


def lora_loader(
    settings: EngineSettings, checkpoint: Checkpoint, source: WeightSource, number_format: NumberFormat
) -> LoadAdapter | None:
    """Return what loads adapters of this model, None unless settings enable them."""
    if not settings.has_lora:
        return None
    if checkpoint.config.recurrence is not None:
        raise ConfigError("lora_modules or enable_lora is set, for a model with recurrent layers: not supported there")
    if checkpoint.config.latent is not None:
        raise ConfigError("lora_modules or enable_lora is set, for a model with latent attention: not supported there")
    reader = LoraReader(checkpoint.config, family_of(checkpoint.config.family, str(checkpoint.path)))
    loader = _CpuLoraLoader(checkpoint.config, CpuWeightLoader(checkpoint.config, source, number_format), reader)
    return loader.load


class _CpuLoraLoader:
    def __init__(self, config: ModelConfig, weights: CpuWeightLoader, reader: LoraReader) -> None:
        self._weights, self._reader = weights, reader
        self._shapes = layer_shapes(config)

    def load(self, name: str, path: str) -> LoadedAdapter:
        """See engine.adapters.LoadAdapter."""
        folder = open_lora(path)
        layers = tuple(self._layer(index, matrices) for index, matrices in enumerate(self._reader.read(folder)))
        return LoadedAdapter(AdapterRef(name, folder.digest), CpuLora(layers))

    def _layer(self, index: int, matrices: Mapping[str, LoraMatrices]) -> dict[str, LoraPair]:
        attention_gain, mlp_gain = self._weights.folded_gains(index)
        gains, pairs = {"qkv": attention_gain, "gate_up": mlp_gain}, dict[str, LoraPair]()
        for part in _FUSED:
            found = [(module, matrices.get(module)) for module in PARTS[part]]
            if any(own is not None for _, own in found):
                down, up = self._fused(found)
                gain = gains.get(part)
                share = 1.0 if part in gains else self._weights.added_share
                pairs[part] = LoraPair(down if gain is None else down * gain, up * share)
        return pairs

    def _fused(self, modules: Sequence[tuple[str, LoraMatrices | None]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices of modules that are one product, each module's `up` on its own rows and columns."""
        there = [own for _, own in modules if own is not None]
        down = torch.cat([own.down for own in there])
        up = torch.zeros(sum(self._shapes[module][0] for module, _ in modules), len(down))
        row = column = 0
        for module, own in modules:
            height = self._shapes[module][0]
            if own is not None:
                up[row : row + height, column : column + len(own.down)] = own.up
                column += len(own.down)
            row += height
        return down, up
