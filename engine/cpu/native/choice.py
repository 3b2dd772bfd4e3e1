"""Whether a model can take the native path, and a check that its kernels are right here."""

import logging
import platform
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from checkpoint import Checkpoint
from checkpoint.checkpoint import WeightFormat
from contracts.errors import ConfigError
from engine.cpu.native.weights import matrix_names
from engine.model_loader.checkpoint_weights import StoredBlocks, StoredWeightSource
from engine.settings import EngineSettings
from kernels.cpu.build import BuildError, Say
from kernels.cpu.native import NativeKernels, load_kernels, unsupported
from models.config import Activation, ModelConfig, Multipliers, NormPlacement

NATIVE = "native"
"""The name of the number format: that of the file, KV in bfloat16."""
_NO_AVX2 = "this CPU has no AVX2, without which they would not be faster"
_REMEDY = (
    "workers with native kernels exchange no KV with this one: let all of a pool have them, or start all with --dtype "
    "float16"
)
_log = logging.getLogger(__name__)
_CHECKED_ROWS = 48
_CHECKED_INPUTS = 35
"""So many that tiles of 16 are used where a CPU has them, the last of which is not full."""
_UNPACKED = {gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16")}
# Activations are rounded to int8, 32 at a time: 0.4 % of normal ones in the root mean square.
_TOLERANCE = 0.02


def chosen_kernels(
    settings: EngineSettings, checkpoint: Checkpoint, source: StoredWeightSource
) -> NativeKernels | None:
    """Return the native kernels if they are to serve the model, None if torch is.

    `auto` takes them for GGUF files whose matrices are all quantized, on an x86 CPU with AVX2, unless LoRA adapters are
    to be served, which torch computes. Raises ConfigError if
    they are asked for by name and can't serve it.
    """
    if settings.dtype == NATIVE:
        if settings.has_lora:
            raise ConfigError(f"the dtype '{NATIVE}' computes no LoRA adapters (lora_modules, enable_lora); use auto")
        return native_kernels(settings, checkpoint, source)
    if settings.has_lora:
        return None
    if settings.dtype != "auto" or checkpoint.format is not WeightFormat.GGUF:
        return None
    config = checkpoint.config
    if unfit(config) or any(blocks.kind in _UNPACKED for blocks in _each_format(config, source)):
        return None
    if reason := _unfit_formats(config, source):
        _log.info("torch computes this model: %s", reason)
        return None
    reason = _unsound(config, source, settings.cache_dir, _log.info) if platform.machine() == "x86_64" else _NO_AVX2
    if reason is None and load_kernels(settings.cache_dir).best_level == "plain":
        reason = _NO_AVX2
    if reason is not None:
        _log.warning("torch computes this model, which is slower: %s; %s", reason, _REMEDY)
        return None
    return load_kernels(settings.cache_dir)


def native_kernels(settings: EngineSettings, checkpoint: Checkpoint, source: StoredWeightSource) -> NativeKernels:
    """Return the native kernels. Raises ConfigError, which says why, if they can't serve the model here."""
    if reason := reason_against(checkpoint.config, source, settings.cache_dir, _log.info):
        raise ConfigError(f"the dtype '{NATIVE}' is not possible here: {reason}; use auto")
    return load_kernels(settings.cache_dir)


def reason_against(config: ModelConfig, source: StoredWeightSource, cache_dir: Path, say: Say) -> str | None:
    """Return why the native path can't serve this model here, or None. Builds the kernels if need be."""
    if source.quantized is not None:
        return "there are no native kernels for quantized safetensors"
    return unfit(config) or _unfit_formats(config, source) or _unsound(config, source, cache_dir, say)


def unfit(config: ModelConfig) -> str | None:
    """Return what the model has that the native step lacks, or None."""
    has_more = {
        "experts": config.experts is not None,
        "attention over latents": config.latent is not None,
        "attention sinks": config.sinks,
        "attention in segments": bool(config.segment),
        "recurrent layers": config.recurrence is not None,
        "gates of attention": config.output_gate,
        "layers without rope": bool(config.no_rope_layers),
        "norms of heads without gains": config.plain_qk_norm,
        "norms of all heads together": config.joint_qk_norm,
        "rope of a part of each head": config.rotary_width != config.head_dim,
        "rope of its own in windows": config.window_rope is not None,
        "norms after attention and MLP": config.norms is not NormPlacement.BEFORE,
        "GELU": config.activation is not Activation.SILU,
        "multipliers": config.multipliers != Multipliers(),
        "head that classifies texts": config.num_labels > 0,
    }
    lacking = [name for name, is_there in has_more.items() if is_there]
    if lacking:
        return f"the native step has no {' and no '.join(lacking)}"
    widths = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    odd = [f"{name} {width}" for name, width in {**widths, "head_dim": config.head_dim}.items() if width % 32]
    return f"the native step takes multiples of 32, not {', '.join(odd)}" if odd else None


def _unfit_formats(config: ModelConfig, source: StoredWeightSource) -> str | None:
    lacking = unsupported([blocks.kind for blocks in _each_format(config, source)])
    return f"there are no native kernels for {', '.join(lacking)}" if lacking else None


def _unsound(config: ModelConfig, source: StoredWeightSource, cache_dir: Path, say: Say) -> str | None:
    try:
        kernels = load_kernels(cache_dir, say)
    except (BuildError, OSError) as error:
        return f"the native kernels are not here: {error}"
    return next((wrong for blocks in _each_format(config, source) if (wrong := self_check(kernels, blocks))), None)


def _each_format(config: ModelConfig, source: StoredWeightSource) -> Iterator[StoredBlocks]:
    """Yield one matrix of each format in the file."""
    seen = set()
    for name in matrix_names(config):
        blocks = source.blocks(name)
        if blocks.kind not in seen:
            seen.add(blocks.kind)
            yield blocks


def self_check(kernels: NativeKernels, blocks: StoredBlocks) -> str | None:
    """Return what is wrong with the product of a matrix, or None.

    Some of its rows are multiplied, and compared with what the gguf package makes of them.
    """
    rows = np.array(blocks.rows[:_CHECKED_ROWS])
    weight = gguf.dequantize(rows, blocks.kind).astype(np.float32).reshape(len(rows), -1)
    x = np.random.default_rng(0).standard_normal((_CHECKED_INPUTS, weight.shape[1]), np.float32)
    exact, found = x @ weight.T, kernels.linear(kernels.pack(blocks.kind, rows), x)
    error = float(np.linalg.norm(found - exact)) / max(float(np.linalg.norm(exact)), 1e-30)
    # A comparison that NaN fails, too.
    return None if error <= _TOLERANCE else f"the native product of {blocks.kind.name} is wrong by {error:.0%} here"
