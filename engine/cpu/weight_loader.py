"""From a checkpoint to packed weights, with norm gains folded in."""

import torch

from checkpoint.checkpoint import Progress
from engine.cpu.decoder import DecoderWeights
from engine.cpu.decoder_layer import CpuLayerWeights
from engine.cpu.expert_router import ExpertRouter
from engine.cpu.head_projection import HeadProjection, Projection
from engine.cpu.latent_attention import LatentOutput, LatentProjection
from engine.cpu.linear import Linear, NumberFormat, PhasedLinear
from engine.cpu.mlp import ClampedMlp, CpuMlp, GatedMlp, GeluMlp
from engine.cpu.moe import CpuGatedExpert, CpuMoE, CpuSharedExpertMoE
from engine.cpu.mtp.head import MtpWeights
from engine.cpu.recurrent_layer import RecurrentMixer, RecurrentWeights
from engine.model_loader.checkpoint_weights import WeightSource
from engine.model_loader.decoder_tensors import Expert, ModelTensors, layer_prefix, widened
from engine.model_loader.latent_tensors import latent_tensors
from engine.model_loader.recurrent_tensors import RecurrentTensors
from models.config import Activation, AttentionKind, ModelConfig, NormPlacement

_NORMS_BEFORE = ("input_layernorm", "post_attention_layernorm")
_NORMS_AFTER = ("post_self_attn_layernorm", "post_mlp_layernorm")
_MLPS = {Activation.SILU: GatedMlp, Activation.GELU_TANH: GeluMlp}


def load_weights(
    config: ModelConfig, source: WeightSource, number_format: NumberFormat, progress: Progress
) -> DecoderWeights:
    """Raises ConfigError for a tensor that is missing or has another shape than the configuration says."""
    loader = CpuWeightLoader(config, source, number_format)
    # First: a vocabulary of another size is told before much is loaded.
    embedding, final_gain, head, state_gain = loader.ends()
    layers = []
    for index in range(config.num_layers):
        progress("load", index, config.num_layers)
        layers.append(loader.layer(index))
    progress("load", config.num_layers, config.num_layers)
    return DecoderWeights(embedding, tuple(layers), final_gain, head, state_gain)


def load_mtp_weights(
    config: ModelConfig, source: WeightSource, number_format: NumberFormat, embedding: torch.Tensor
) -> MtpWeights:
    """Return those of the layer for multi-token prediction, which stands behind the model's layers.

    `embedding` is the model's, as the output head is: the copies of both that a checkpoint may have are not read.
    Raises ConfigError for a tensor that is missing or has another shape than the configuration says.
    """
    return CpuWeightLoader(config, source, number_format).mtp(embedding)


class CpuWeightLoader:
    """The packed weights of one layer after the other."""

    def __init__(self, config: ModelConfig, source: WeightSource, number_format: NumberFormat) -> None:
        self._config, self._source, self._format = config, source, number_format
        self._tensors = ModelTensors(config, source, interleaved=True)

    def layer(self, index: int) -> CpuLayerWeights:
        prefix, spec = layer_prefix(index), self._config.layer(index)
        attention_gain, mlp_gain = (self._gain_before(prefix + name) for name in _NORMS_BEFORE)
        attention_out_gain, mlp_out_gain = (self._gain_after(prefix + name) for name in _NORMS_AFTER)
        is_recurrent = index in self._config.recurrent_layers
        parts = self._recurrent(index, attention_gain) if is_recurrent else self._attention(index, attention_gain)
        return CpuLayerWeights(
            attention_gain=self._unfolded(attention_gain),
            projection=parts[0],
            output=parts[1],
            mlp_gain=self._unfolded(mlp_gain),
            mlp=self._mlp(index, mlp_gain),
            sinks_KG=self._sinks(prefix),
            has_window=spec.attention in (AttentionKind.WINDOW, AttentionKind.CHUNKED),
            is_rotated=spec.rope is not None,
            attention_out_gain=attention_out_gain,
            mlp_out_gain=mlp_out_gain,
            output_gate=None if is_recurrent else self._output_gate(prefix, attention_gain),
        )

    def _recurrent(self, index: int, gain: torch.Tensor | None) -> tuple[RecurrentMixer, PhasedLinear]:
        """Return what a recurrent layer has in place of attention, and what comes after it."""
        config = self._config
        assert config.recurrence is not None, "no layer is recurrent"
        tensors = RecurrentTensors(config.recurrence, config.hidden_size, self._source, layer_prefix(index))
        weights = RecurrentWeights(
            project=self._format.pack(self._fold(tensors.projection(), gain)),
            rates=self._format.router(self._fold(tensors.rates(), gain), None),
            conv_WKC=tensors.convolution(),
            decay_H=-tensors.of_heads("A_log").exp(),
            step_bias_H=tensors.of_heads("dt_bias"),
            gain_V=tensors.gain() * config.recurrence.value_dim**0.5,
        )
        return RecurrentMixer(config.recurrence, weights, config.norm_eps), self._added(tensors.output(), None)

    def _output_gate(self, prefix: str, gain: torch.Tensor | None) -> PhasedLinear | None:
        if not self._config.output_gate:
            return None
        return self._format.pack(self._fold(self._tensors.output_gate(prefix), gain))

    def _attention(self, index: int, gain: torch.Tensor | None) -> tuple[Projection, PhasedLinear | LatentOutput]:
        """Return what comes before and after a layer's attention; `gain` is that of the norm before."""
        tensors, prefix, config = self._tensors, layer_prefix(index), self._config
        output = self._added(tensors.fused(prefix, "output"), tensors.output_bias(prefix))
        if config.latent is None:
            qkv = self._format.pack(self._fold(tensors.fused(prefix, "qkv"), gain), tensors.qkv_bias(prefix))
            q_gain, k_gain = (self._head_gain(index, name) for name in "qk")
            return HeadProjection(config, qkv, q_gain, k_gain), output
        found = latent_tensors(config, self._source, prefix)
        q_gain = None if found.q_gain is None else found.q_gain * len(found.q_gain) ** 0.5
        q_up = None if found.q_up is None else self._format.pack(self._fold(found.q_up, q_gain))
        kv_gain = found.kv_gain * len(found.kv_gain) ** 0.5
        down = self._format.pack(self._fold(found.down, gain))
        unfolded = self._unfolded(q_gain)
        return (
            LatentProjection(config.latent, down, q_up, unfolded, kv_gain, found.keys),
            LatentOutput(config.latent, found.values, output),
        )

    def folded_gains(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return a layer's gains that are folded into attention's and the MLP's first matrices."""
        if not self._format.folds:
            return None, None
        attention_gain, mlp_gain = (self._gain_before(layer_prefix(index) + name) for name in _NORMS_BEFORE)
        return attention_gain, mlp_gain

    @property
    def added_share(self) -> float:
        """Return what the matrices whose rows are added to the residual are multiplied by."""
        return self._config.multipliers.residual if self._config.norms is NormPlacement.BEFORE else 1.0

    def _sinks(self, prefix: str) -> torch.Tensor | None:
        sinks = self._tensors.sinks(prefix)
        return None if sinks is None else sinks.view(self._config.num_kv_heads, -1)

    def _mlp(self, index: int, gain: torch.Tensor | None) -> CpuMlp:
        tensors, prefix, experts = self._tensors, layer_prefix(index), self._config.experts_of(index)
        if experts is None:
            return self._gated(prefix, "gate_up", "down", gain)
        scores = self._format.router(self._fold(tensors.router(prefix), gain), tensors.router_bias(prefix))
        each = [self._expert(expert, gain) for expert in tensors.experts(prefix)]
        if experts.as_llama4:
            return CpuSharedExpertMoE(scores, each, self._gated(prefix, "shared_gate_up", "shared_down", gain))
        router = ExpertRouter(experts, scores, tensors.choice_bias(prefix))
        if not experts.shared_size:
            return CpuMoE(router, each)
        shared = self._gated(prefix, "shared_gate_up", "shared_down", gain)
        if not experts.gates_shared:
            return CpuMoE(router, each, shared)
        gate = self._format.router(self._fold(tensors.shared_gate(prefix), gain), None)
        return CpuMoE(router, each, CpuGatedExpert(gate, shared))

    def _gated(self, prefix: str, gate_up: str, down: str, gain: torch.Tensor | None) -> CpuMlp:
        first = self._format.pack(self._fold(self._tensors.fused(prefix, gate_up), gain))
        kind = _MLPS[self._config.activation]
        return kind(first, self._added(self._tensors.fused(prefix, down), None))

    def _expert(self, expert: Expert, gain: torch.Tensor | None) -> CpuMlp:
        gate_up = self._format.pack(self._fold(widened(expert.gate_up), gain), expert.gate_up_bias)
        kind = _MLPS[self._config.activation] if expert.gate_up_bias is None else ClampedMlp
        return kind(gate_up, self._added(widened(expert.down), expert.down_bias))

    def ends(self) -> tuple[torch.Tensor, torch.Tensor | None, Linear, torch.Tensor]:
        """The embedding table, the final norm's gain unless folded, the output head, and its gain."""
        embedding = self._tensors.embedding()
        part = "score" if self._config.num_labels else "head"
        head = embedding if self._config.tied_embeddings else self._tensors.fused("", part)
        own = self._gain("model.norm")
        gain = own * self._config.multipliers.logits
        return embedding, self._unfolded(gain), self._format.head(self._fold(head, gain), None), own

    def mtp(self, embedding: torch.Tensor) -> MtpWeights:
        index, hidden = self._config.num_layers, self._config.hidden_size
        prefix = layer_prefix(index)
        gains = [self._gain(prefix + name) for name in ("enorm", "hnorm", "shared_head.norm")]
        join = self._tensors.matrix(prefix + "eh_proj", hidden, 2 * hidden)
        head = embedding if self._config.tied_embeddings else self._tensors.fused("", "head")
        join, head = (self._format.head(matrix, None) for matrix in (join, head))
        return MtpWeights(embedding, gains[0], gains[1], join, self.layer(index), gains[2], head)

    def _gain(self, name: str) -> torch.Tensor:
        return self._tensors.gain(name) * self._config.hidden_size**0.5

    def _gain_before(self, name: str) -> torch.Tensor | None:
        return None if self._config.norms is NormPlacement.AFTER else self._gain(name)

    def _gain_after(self, name: str) -> torch.Tensor | None:
        if self._config.norms is NormPlacement.BEFORE:
            return None
        return self._gain(name) * self._config.multipliers.residual

    def _added(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PhasedLinear:
        """Return what is added to the residual, times what the model multiplies that by."""
        share = self.added_share
        if share != 1:
            weight, bias = weight * share, None if bias is None else bias * share
        return self._format.pack(weight, bias)

    def _fold(self, weight: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        return weight * gain if self._format.folds and gain is not None else weight

    def _unfolded(self, gain: torch.Tensor | None) -> torch.Tensor | None:
        return None if self._format.folds else gain

    def _head_gain(self, index: int, name: str) -> torch.Tensor | None:
        gain = self._tensors.head_gain(index, name)
        return None if gain is None else gain * len(gain) ** 0.5
