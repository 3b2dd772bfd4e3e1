"""The choice of a number format for a CPU."""

import torch

from contracts.errors import ConfigError
from engine.cpu.linear import FORMATS, int4_grid
from engine.model_loader.checkpoint_weights import WeightSource
from engine.settings import EngineSettings
from kernels.cpu.isa import CpuIsa, apply_isa, is_bfloat16_fast, probe_isa
from models.config import ModelConfig


def resolve_dtype(settings: EngineSettings, source: WeightSource, config: ModelConfig) -> str:
    """Return the name of a number format of torch's path; caps oneDNN first where bfloat16 would crash.

    Raises ConfigError for an unknown name, and for one that this CPU or these weights can't have.

    `auto`: float16 weights, twice float32's decode rate and nearly its text; for the rows of prompts bfloat16 where
    this kind of CPU multiplies it much faster. For the rows of answers weights that are int4 in the file stay so if
    AVX-512 unpacks them: AVX2 does it slower than it reads float16 (0.9 times on an EPYC).
    """
    dtype, attending = settings.dtype, min({*range(config.num_layers)} - {*config.recurrent_layers})
    if dtype not in FORMATS and dtype != "auto":
        raise ConfigError(f"the dtype '{dtype}' is not supported; supported are auto, native, {', '.join(FORMATS)}")
    has_fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
    if dtype in ("float16", "mixed16", "mixed4", "int4", "int8") and not has_fbgemm:
        raise ConfigError(f"the dtype '{dtype}' needs an x86 CPU with AVX2; use float32")
    if dtype in ("int4", "mixed4") and not _is_int4(source, attending):
        raise ConfigError(
            f"the dtype '{dtype}' is for weights that are int4 in their file (GGUF, Q4_1); use float16 or int8"
        )
    if dtype in ("float32", "float16"):
        return dtype
    isa = probe_isa(settings.cache_dir)
    apply_isa(isa)
    if dtype == "auto":
        return _fastest(isa, has_fbgemm, source, attending)
    if dtype in ("bfloat16", "mixed16", "mixed4") and not isa.has_bfloat16:
        raise ConfigError(f"the dtype '{dtype}' multiplies bfloat16, which this CPU can't; use float16 or float32")
    return dtype


def _fastest(isa: CpuIsa, has_fbgemm: bool, source: WeightSource, attending: int = 0) -> str:
    if not has_fbgemm:
        return "float32"
    # Asked on every CPU: weights that do not fit their configuration are told of before they are loaded.
    takes_int4 = _is_int4(source, attending) and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if is_bfloat16_fast(isa):
        return "mixed4" if takes_int4 else "mixed16"
    return "int4" if takes_int4 else "float16"


def _is_int4(source: WeightSource, attending: int) -> bool:
    """Judge by a matrix of a layer that attends, by its index; pack_int4_if_exact then looks at each."""
    return int4_grid(source.tensor(f"model.layers.{attending}.self_attn.o_proj.weight")) is not None
