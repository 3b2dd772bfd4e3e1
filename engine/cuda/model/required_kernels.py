"""The kernels without which no graph can be captured."""

from contracts.errors import ConfigError
from engine.cuda.model.number_formats import DeviceFormat
from kernels.registry import Registry
from kernels.specs import AttnSpec, RopeSpec
from models.config import ModelConfig


def require_kernels(registry: Registry, config: ModelConfig, number_format: DeviceFormat, block_size: int) -> None:
    """Raise ConfigError where attention or rope fall back on the reference, which no graph can hold.

    FlashInfer may attend where nothing of ours does, and it has no rope that appends.
    """
    attention = AttnSpec(config.num_heads, config.num_kv_heads, config.head_dim, block_size, number_format.kv)
    rope = RopeSpec(config.num_heads, config.num_kv_heads, config.head_dim, block_size, number_format.kv)
    for op, spec in (("attn_decode", attention), ("attn_prefill", attention), ("rope_append", rope)):
        choice = registry.resolve(op, spec)
        if choice.impl.name == "reference":
            reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.rejected)
            words = f"head_dim is {config.head_dim}, and no attention kernel runs ({reasons})"
            raise ConfigError(f"{words}: use dtype float32")
