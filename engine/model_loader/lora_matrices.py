"""The matrices of a LoRA adapter, by the modules of a decoder that they change."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from checkpoint.huggingface.safetensors_index import tensor_names
from checkpoint.lora import LoraFolder
from contracts.errors import ConfigError
from engine.model_loader.checkpoint_weights import FusedRows, fused_rows, llama_name
from engine.model_loader.decoder_tensors import PARTS, layer_shapes, rotary_order
from models.config import ModelConfig
from models.family import Family

_ROOT = "base_model.model."
_ROTATED = PARTS["qkv"][:2]
_MODULE = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class LoraMatrices:
    """The matrices whose product, `up` times `down`, is added to a module's weight.

    They are `[out, rank]` and `[rank, in]`, float32, scaled. Rows of q and k have the two parts of a rotary pair side
    by side.
    """

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True)
class _Target:
    """A module as it is stored. `parts`: those that it is one of, or made of, with the rows of each."""

    layer: int
    shape: tuple[int, int]
    parts: tuple[tuple[str, slice], ...]


class LoraReader:
    """The matrices of one adapter after another, for one model."""

    def __init__(self, config: ModelConfig, family: Family) -> None:
        self._config, self._names = config, family.names
        self._shapes, self._fused = layer_shapes(config), fused_rows(config, family.names)

    def read(self, folder: LoraFolder) -> list[dict[str, LoraMatrices]]:
        """Return for each layer its matrices, by module.

        Raises ConfigError for a tensor that this model has no place for, or of another shape.
        """
        layers: list[dict[str, LoraMatrices]] = [{} for _ in range(self._config.num_layers)]
        names = set(tensor_names(folder.weights))
        modules = sorted({self._module(name, folder) for name in sorted(names)})
        try:
            with safe_open(folder.weights, framework="pt") as file:
                for module in modules:
                    target = self._target(module, folder)
                    down, up = (
                        self._tensor(file, f"{_ROOT}{module}.lora_{each}.weight", names, folder) for each in "AB"
                    )
                    self._require_shapes(module, target, down, up, folder)
                    up = up * folder.config.scaling_of(module)
                    for part, rows in target.parts:
                        layers[target.layer][part] = LoraMatrices(down, self._turned(part, up[rows]))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {folder.weights}: {error}") from error
        return layers

    def _module(self, name: str, folder: LoraFolder) -> str:
        """Return a tensor's module in the base model."""
        found = re.fullmatch(rf"{re.escape(_ROOT)}(.+)\.lora_[AB]\.weight", name)
        if found is None:
            raise ConfigError(f"{folder.weights}: '{name}' is not supported: only lora_A and lora_B of matrices are")
        folder.config.require_target(found[1])
        return found[1]

    def _target(self, module: str, folder: LoraFolder) -> _Target:
        is_text = not self._names.left_out or not module.startswith(self._names.left_out)
        found = _MODULE.fullmatch(llama_name(module, self._names))
        if found is None or not is_text:
            raise ConfigError(f"{folder.weights}: adapters of '{module}' are not supported: those of a layer's are")
        layer, name = int(found[1]), found[2]
        if layer >= self._config.num_layers:
            raise ConfigError(
                f"{folder.weights} changes '{module}'; this model has {self._config.num_layers} layers: the adapter is "
                "of another one"
            )
        if name.startswith("mlp.") and self._config.experts_of(layer) is not None:
            raise ConfigError(f"{folder.weights}: adapters of a mixture of experts ('{module}') are not supported")
        parts = {part: place for part, place in self._fused.items() if place.module == name}
        if parts:
            return _Target(layer, self._fused_shape(parts), tuple((p, _slice(place)) for p, place in parts.items()))
        if name not in self._shapes or name in self._fused:
            raise ConfigError(f"{folder.weights} changes '{module}', which this model does not have")
        return _Target(layer, self._shapes[name], ((name, slice(None)),))

    def _fused_shape(self, parts: dict[str, FusedRows]) -> tuple[int, int]:
        part, place = next(iter(parts.items()))
        return place.height, self._shapes[part][1]

    def _tensor(self, file: Any, name: str, names: set[str], folder: LoraFolder) -> torch.Tensor:
        if name not in names:
            raise ConfigError(f"{folder.weights} lacks '{name}'")
        return file.get_tensor(name).float()

    def _require_shapes(
        self, module: str, target: _Target, down: torch.Tensor, up: torch.Tensor, folder: LoraFolder
    ) -> None:
        (n, k), rank = target.shape, folder.config.rank_of(module)
        for letter, tensor, shape in (("A", down, (rank, k)), ("B", up, (n, rank))):
            if tensor.shape != shape:
                raise ConfigError(
                    f"{folder.weights}: '{_ROOT}{module}.lora_{letter}.weight' is {list(tensor.shape)}; "
                    f"{list(shape)} is expected: r or rank_pattern says {rank}, the rest is the model's"
                )

    def _turned(self, part: str, up: torch.Tensor) -> torch.Tensor:
        return rotary_order(up, self._config, self._names.interleaved, True) if part in _ROTATED else up


def _slice(place: FusedRows) -> slice:
    return slice(place.rows.start, place.rows.stop)
