"""gpt-oss (OpenAI 2025): a mixture of MXFP4 experts.

Attention with sinks, in a window in every other layer.
"""

from typing import Any

from contracts.errors import ConfigError
from models.config_fields import mixture
from models.family import Family

_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def gpt_oss_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig.

    Raises ConfigError for what would give wrong text if it were ignored.
    """
    _refuse_other(config, source)
    is_mxfp4 = bool(config.get("quantization_config"))
    experts = mixture(config, source, config["intermediate_size"], True, as_gpt_oss=True, is_mxfp4=is_mxfp4)
    return {"experts": experts, "output_bias": True, "sinks": True}


def _refuse_other(config: dict[str, Any], source: str) -> None:
    other = {key: config[key] for key, value in _SWIGLU.items() if config.get(key, value) != value}
    if other:
        raise ConfigError(f"{source}: experts with {other} are not supported; supported is {_SWIGLU}")
    if not config.get("attention_bias", True) or not config.get("sliding_window"):
        raise ConfigError(f"{source}: gpt-oss without attention_bias or without a sliding_window is not supported")
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method", "mxfp4") if isinstance(quantization, dict) else quantization
    if method != "mxfp4":
        raise ConfigError(f"{source}: gpt-oss quantized by '{method}' is not supported; supported are mxfp4 and plain")


FAMILY = Family(
    "GptOssForCausalLM",
    "gpt-oss",
    read=gpt_oss_fields,
    qkv_bias=True,
    reads_attention_bias=True,
    rope_theta=150000.0,
    head_dim=64,
    window=0,
    first_window=0,
    window_step=2,
)
