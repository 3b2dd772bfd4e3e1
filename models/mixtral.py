"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in place of the MLP."""

from typing import Any

from models.config_fields import mixture
from models.family import Family, TensorNames


def mixtral_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    return {"experts": mixture(config, source, config["intermediate_size"], True)}


FAMILY = Family(
    "MixtralForCausalLM",
    "mixtral",
    read=mixtral_fields,
    names=TensorNames(
        renamed=(
            (".block_sparse_moe.", ".mlp."),
            (".w1.", ".gate_proj."),
            (".w2.", ".down_proj."),
            (".w3.", ".up_proj."),
        )
    ),
    rope_theta=1000000.0,
    window=0,
)
