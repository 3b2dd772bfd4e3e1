"""Which number format a GPU holds a model in, and which of them keeps what is stored.

Imports no torch, so that `tandem up` can say before it starts anything what a model takes.
"""

from checkpoint import Checkpoint
from checkpoint.quantization import Quantization, Scheme
from contracts.errors import ConfigError
from models.config import ModelConfig

DEVICE_DTYPES = ("float8", "float8-head", "int4", "bfloat16", "float32")
"""The names of engine.cuda.model.number_formats.DEVICE_FORMATS."""
INT4_GROUP = 128
"""Columns that share a scale in the kernels for 4-bit weights, or a multiple of them."""
MIN_FP8_HIDDEN = 2048
"""Smaller models lose by FP8 (docs/models.md, "What FP8 costs"), and are fast enough without."""


def resolve_device_dtype(dtype: str, checkpoint: Checkpoint, cc: int) -> str:
    """`cc`: the GPU's compute capability, 90 for 9.0.

    `auto`: what keeps a quantized checkpoint as it is; for plain weights FP8 where the GPU multiplies it, but for small
    models; FP8 neither way for models with `_has_large_keys`. Raises ConfigError for an unknown name, and for `int4` of
    weights that can't be held so.
    """
    if dtype != "auto" and dtype not in DEVICE_DTYPES:
        names = ", ".join(DEVICE_DTYPES)
        raise ConfigError(f"the dtype '{dtype}' is not supported on a GPU; supported are auto, {names}")
    stored, reason = kept_as(checkpoint)
    if dtype == "int4" and stored != "int4":
        raise ConfigError(f"the dtype 'int4' keeps weights that are so in their checkpoint; {reason}: use bfloat16")
    if dtype != "auto":
        return dtype
    if cc < 90:
        return "float32"  # no kernel of ours is compiled for these; the reference attends in this format alone
    if checkpoint.quantization is not None:
        return stored
    is_large = checkpoint.config.hidden_size >= MIN_FP8_HIDDEN
    return "float8" if is_large and not _has_large_keys(checkpoint.config) else "bfloat16"


def _has_large_keys(config: ModelConfig) -> bool:
    """Return whether keys are too large for e4m3.

    Qwen2's biases make keys of hundreds, which in e4m3 ruin its text (QwenLM/Qwen3#840, NVIDIA/TensorRT-LLM#4218).
    """
    return config.qkv_bias and not config.sinks


def has_fused_step(config: ModelConfig) -> bool:
    """Whether the decode step of seven launches a layer takes these shapes in FP8.

    It knows no experts, and its products want whole tiles. Small models with biases or norms of heads are rounded
    sparingly instead, their keys smooth, which it does not know either.
    """
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    kv_width = config.num_kv_heads * config.head_dim
    return (
        not config.experts
        and not (config.hidden_size < MIN_FP8_HIDDEN and (config.qkv_bias or config.qk_norm))
        and all(width % 256 == 0 for width in widths)
        and kv_width % 64 == 0
        and config.head_dim in (32, 64, 128, 256)
        and config.num_heads // config.num_kv_heads <= 16
    )


def rounds_sparingly(config: ModelConfig) -> bool:
    """Return whether FP8 of a plain checkpoint leaves activations and the last layer's MLP plain.

    That MLP costs more than any other (docs/models.md, "What FP8 costs"). Not where speed matters, nor where the fused
    step would be lost.
    """
    return config.hidden_size < MIN_FP8_HIDDEN and not has_fused_step(config)


def smooths_keys(config: ModelConfig) -> bool:
    """Return whether keys in e4m3 are smooth (kernels.specs.RopeSpec).

    Those of models that are rounded sparingly, but not beside sinks, which would weigh more or less by it.
    """
    return rounds_sparingly(config) and not config.sinks and config.head_dim.bit_count() == 1


def experts_changed(quantization: Quantization, dtype: str) -> str:
    """Return why quantized experts are not multiplied as they are stored.

    In a format that keeps the other matrices so; empty if they are.
    """
    if dtype == "int4":
        return "widened to bfloat16: grouped products take no INT4"
    is_blocks = quantization.scheme is Scheme.FP8_BLOCKS
    return "rounded once more, with a scale a row: grouped products take no blocks" if is_blocks else ""


def kept_as(checkpoint: Checkpoint) -> tuple[str, str]:
    """The dtype that multiplies a checkpoint's weights as they are stored.

    Or "bfloat16", to which they are widened on load, and why.
    """
    quantization = checkpoint.quantization
    if quantization is None:
        return "bfloat16", "they are not quantized"
    if not quantization.has_kernels:
        return "bfloat16", f"no kernel here multiplies {quantization.form}"
    if not quantization.is_int4:
        if _has_large_keys(checkpoint.config):
            return "bfloat16", "they are FP8, and float8 has keys in e4m3, which biases make hundreds"
        if checkpoint.config.experts is not None and not quantization.rounds_activations:
            return "bfloat16", "input_activations is null: grouped products of experts would round activations"
        return "float8", "they are FP8"
    if quantization.act_order:
        return "bfloat16", "desc_act is true: the columns of a group lie apart"
    if quantization.group_size != -1 and quantization.group_size % INT4_GROUP:
        return "bfloat16", f"group_size is {quantization.group_size}: the kernels want multiples of {INT4_GROUP}, or -1"
    return "int4", ""
