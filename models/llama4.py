"""Llama 4 (Meta 2025), its text part.

Mixtures with a shared expert, attention in segments, layers without rope.
"""

from typing import Any

from contracts.errors import ConfigError
from models.config import AttentionTemperature, Experts
from models.family import Family, TensorNames

# Pages of the KV cache have at most so many tokens, and a segment starts with one.
_SEGMENT_STEP = 64
_SEGMENT = 8192  # where config.json does not say, as in transformers
_KINDS = ("chunked_attention", "full_attention")


def llama4_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig.

    Raises ConfigError for what would give wrong text if it were ignored.
    """
    _refuse_other(config, source)
    layers = range(config["num_hidden_layers"])
    turned = config.get("no_rope_layers") or [(layer + 1) % config.get("no_rope_layer_interval", 4) for layer in layers]
    segment = _segment(config, source)
    kinds = config.get("layer_types") or [_KINDS[0] if turns else _KINDS[1] for turns in turned]
    if len(turned) < len(layers) or len(kinds) != len(layers) or not {*kinds} <= {*_KINDS}:
        raise ConfigError(f"{source}: no_rope_layers and layer_types must say for each layer what it is, of {_KINDS}")
    return {
        "intermediate_size": config["intermediate_size_mlp"],
        "experts": _experts(config, layers, source),
        "segment": segment,
        "windowed_layers": tuple(layer for layer in layers if segment and kinds[layer] == _KINDS[0]),
        "no_rope_layers": tuple(layer for layer in layers if not turned[layer]),
        "attention_temperature": _attention_temperature(config),
        "plain_qk_norm": bool(config.get("use_qk_norm", True)),
    }


def _experts(config: dict[str, Any], layers: range, source: str) -> Experts:
    step = config.get("interleave_moe_layer_step", 1)
    if step < 1:
        raise ConfigError(f"{source}: experts in every layer of {step} are not supported")
    mixed = config.get("moe_layers")
    mixed = range(step - 1, len(layers), step) if mixed is None else mixed
    dense = tuple(layer for layer in layers if layer not in mixed)
    return Experts(config["num_local_experts"], 1, config["intermediate_size"], True, dense, as_llama4=True)


def _attention_temperature(config: dict[str, Any]) -> AttentionTemperature | None:
    if not config.get("attn_temperature_tuning", True):
        return None
    return AttentionTemperature(float(config.get("floor_scale", 8192)), float(config.get("attn_scale", 0.1)))


def _refuse_other(config: dict[str, Any], source: str) -> None:
    top_k = config.get("num_experts_per_tok", 1)
    if top_k != 1:
        raise ConfigError(f"{source}: a Llama 4 with {top_k} experts a token is not supported; supported is 1")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("yarn", "longrope", "su"):  # which stretch q and k: norms and rope would not commute
        raise ConfigError(f"{source}: a Llama 4 with {kind} is not supported; supported are default and llama3")


def _segment(config: dict[str, Any], source: str) -> int:
    segment = config.get("attention_chunk_size", _SEGMENT) or 0
    if segment % _SEGMENT_STEP:
        raise ConfigError(
            f"{source}: an attention_chunk_size of {segment} is not supported; supported are multiples of "
            f"{_SEGMENT_STEP}"
        )
    return segment


FAMILY = Family(
    "Llama4ForCausalLM",
    "llama4",
    multimodal="Llama4ForConditionalGeneration",
    read=llama4_fields,
    names=TensorNames(
        renamed=(("language_model.", ""), (".feed_forward.", ".mlp.")),
        left_out=("vision_model.", "multi_modal_projector."),
        interleaved=True,
    ),
    head_dim=128,
    rope_theta=500000.0,
)
