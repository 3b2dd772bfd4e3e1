"""Qwen3.5 (Qwen Team 2026), its text part: Qwen3-Next's layers with an MLP in place of the mixture."""

from typing import Any

from models.config_fields import recurrent_fields
from models.family import Family, TensorNames
from models.qwen3_next import DEFAULTS, GAIN_OF_HEADS


def qwen3_5_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    return recurrent_fields(config, source)


FAMILY = Family(
    "Qwen3_5ForCausalLM",
    "qwen35",
    multimodal="Qwen3_5ForConditionalGeneration",
    read=qwen3_5_fields,
    names=TensorNames(
        renamed=(("model.language_model.", "model."), GAIN_OF_HEADS),
        left_out=("model.visual.",),
        drafting=("mtp.",),
        gain_offset=1.0,
    ),
    defaults=DEFAULTS,
    qk_norm=True,
    partial_rotary=0.25,
)
