"""One layer of a decoder on the CPU: its weights, and what surrounds attention."""

from dataclasses import dataclass

import torch

from engine.cpu.head_projection import Projection
from engine.cpu.latent_attention import LatentOutput
from engine.cpu.linear import PhasedLinear
from engine.cpu.lora import LayerLora
from engine.cpu.mlp import CpuMlp, GatedMlp
from engine.cpu.norms import RmsNorm
from engine.cpu.recurrent_layer import RecurrentMixer
from models.config import ModelConfig, NormPlacement


@dataclass(frozen=True)
class CpuLayerWeights:
    """Gains are times sqrt(width), or None where folded into the next linear.

    `is_rotated`: by rope. The `out` gains are of norms over what attention and MLP give, where a family has such.
    `output_gate` gives what gates attention's output, if a family has that.
    """

    attention_gain: torch.Tensor | None
    projection: Projection | RecurrentMixer
    output: PhasedLinear | LatentOutput
    mlp_gain: torch.Tensor | None
    mlp: CpuMlp
    sinks_KG: torch.Tensor | None = None
    has_window: bool = False
    is_rotated: bool = True
    attention_out_gain: torch.Tensor | None = None
    mlp_out_gain: torch.Tensor | None = None
    output_gate: PhasedLinear | None = None

    @property
    def is_uniform(self) -> bool:
        """After attention: one format for the rows of prompts and of answers."""
        return self.output.is_uniform and self.mlp.is_uniform


class Residual:
    """What layers read of the residual and add to it, by the placement of a model's norms."""

    def __init__(self, config: ModelConfig) -> None:
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)
        self._is_normed_before = config.norms is not NormPlacement.AFTER

    def before(self, x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        """Return what attention or MLP get of the residual."""
        return self.norm(x, gain) if self._is_normed_before else x

    def behind(
        self,
        layer: CpuLayerWeights,
        x: torch.Tensor,
        mixed: torch.Tensor,
        num_answer_rows: int,
        lora: LayerLora | None = None,
    ) -> torch.Tensor:
        """Return what leaves a layer: `x` `[M, hidden]` came to it, and `mixed` is what attention gives.

        Where formats differ, so does rounding between them: each phase by itself. `lora`: which rows adapters change.
        """
        if 0 < num_answer_rows < len(x) and not layer.is_uniform:
            first, end = num_answer_rows, len(x)
            loras = (None, None) if lora is None else (lora.between(0, first), lora.between(first, end))
            answer = self.behind(layer, x[:first], mixed[:first], first, loras[0])
            return torch.cat([answer, self.behind(layer, x[first:], mixed[first:], 0, loras[1])])
        output = layer.output(mixed, num_answer_rows)
        if lora is not None:
            output = lora.add("output", mixed, output)
        x = x + self._after(output, layer.attention_out_gain)
        normed = self.before(x, layer.mlp_gain)
        if lora is not None and lora.has_mlp:
            assert isinstance(layer.mlp, GatedMlp), "an adapter of a mixture was loaded"
            added = layer.mlp(normed, num_answer_rows, lora)
        else:
            added = layer.mlp(normed, num_answer_rows)
        return x + self._after(added, layer.mlp_out_gain)

    def _after(self, y: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        """Return what the residual gets of what they give."""
        return y if gain is None else self.norm(y.float(), gain)
