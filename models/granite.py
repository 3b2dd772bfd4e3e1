"""Granite 3 (IBM 2024): Llama with multipliers of embedding, residual, scores and logits."""

from typing import Any

from contracts.errors import ConfigError
from models.config import Multipliers
from models.family import Family, GgufForm


def granite_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig; what is not stated is 1, as in transformers."""
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    return {"multipliers": _multipliers(*(_amount(config, name, source) for name in names))}


def granite_gguf_fields(metadata: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig; a factor that a file does not state, or states as 0, is 1."""
    names = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
    return {"multipliers": _multipliers(*(_amount(metadata, name, source) for name in names))}


def _multipliers(embedding: float, residual: float, attention: float, logits: float) -> Multipliers:
    return Multipliers(embedding, residual, attention, 1 / logits)


def _amount(stated: dict[str, Any], name: str, source: str) -> float:
    value = float(stated.get(name) or 1.0)
    if not 0 < value < 1e6:
        raise ConfigError(f"{source}: {name} is {value}; a number above 0 is expected")
    return value


FAMILY = Family(
    "GraniteForCausalLM",
    "granite",
    read=granite_fields,
    gguf=GgufForm(
        granite_gguf_fields,
        scales=("embedding_scale", "residual_scale", "attention.scale", "logit_scale"),
        interleaved=True,
    ),
)
