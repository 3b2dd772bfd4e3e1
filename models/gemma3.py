"""Gemma 3 (Google 2025), its text part.

Windows in most layers, which have a rope of their own; norms before and after attention and MLP, with gains that are
stored less 1; a scaled embedding.
"""

from typing import Any

from contracts.errors import ConfigError
from models.config import Activation, Multipliers, NormPlacement, Rope
from models.config_fields import windowed_layers
from models.family import Family, GgufForm, TensorNames

_PATTERN = 6  # every sixth layer sees all, where config.json does not say
_LOCAL_THETA = 10000.0
_REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
_BOTH_SIDES = {"norms": NormPlacement.AROUND, "activation": Activation.GELU_TANH}


def gemma3_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig.

    Raises ConfigError for what would give wrong text if it were ignored.
    """
    if refused := [name for name in _REFUSED if config.get(name)]:
        raise ConfigError(f"{source}: {refused[0]} is {config[refused[0]]}, which is not supported")
    if config["hidden_activation"] != Activation.GELU_TANH:
        raise ConfigError(
            f"{source}: hidden_activation is {config['hidden_activation']!r}; supported is gelu_pytorch_tanh"
        )
    num_layers, pattern = config["num_hidden_layers"], config.get("sliding_window_pattern", _PATTERN)
    if (kinds := config.get("layer_types")) is not None:
        layers = windowed_layers(kinds, num_layers, source)
    else:
        layers = _windowed(num_layers, pattern)
    multipliers = Multipliers(config["hidden_size"] ** 0.5, attention=config["query_pre_attn_scalar"] ** -0.5)
    fields = {"window": config["sliding_window"], "windowed_layers": layers, "multipliers": multipliers, **_BOTH_SIDES}
    has_tables = isinstance((config.get("rope_parameters") or {}).get("full_attention"), dict)
    local = {} if has_tables else {"window_rope": Rope(float(config.get("rope_local_base_freq", _LOCAL_THETA)))}
    return fields | local


def gemma3_gguf_fields(metadata: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig; gains are stored whole there."""
    num_layers, hidden = metadata["block_count"], metadata["embedding_length"]
    key_length = metadata["attention.key_length"]
    # As llama.cpp computes it: the 27B model alone has another scale than its heads' width gives.
    is_largest = num_layers == 62
    scored = hidden / metadata["attention.head_count"] if is_largest else key_length
    return {
        "window": metadata["attention.sliding_window"],
        "windowed_layers": _windowed(num_layers, _PATTERN),
        "window_rope": Rope(float(metadata.get("rope.freq_base_swa", _LOCAL_THETA))),
        "multipliers": Multipliers(hidden**0.5, attention=scored**-0.5),
        **_BOTH_SIDES,
    }


def _windowed(num_layers: int, pattern: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(num_layers) if (layer + 1) % pattern)


FAMILY = Family(
    "Gemma3ForCausalLM",
    "gemma3",
    multimodal="Gemma3ForConditionalGeneration",
    read=gemma3_fields,
    names=TensorNames(
        renamed=(
            ("model.language_model.", "model."),
            ("language_model.", ""),
            (".post_attention_layernorm.", ".post_self_attn_layernorm."),
            (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
            (".post_feedforward_layernorm.", ".post_mlp_layernorm."),
        ),
        left_out=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
        gain_offset=1.0,
    ),
    gguf=GgufForm(gemma3_gguf_fields, tensors=("post_attention_norm", "post_ffw_norm")),
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    qk_norm=True,
    rope_theta=1000000.0,
    window=0,
    ropes_by_kind=True,
)
