"""gpt-oss (OpenAI 2025): a mixture of MXFP4 experts.

Attention with sinks, in a window in every other layer.
"""

from models.family import Family

FAMILY = Family(
    "GptOssForCausalLM", "gpt-oss", qkv_bias=True, experts=True, as_gpt_oss=True, rope_theta=150000.0, head_dim=64
)
