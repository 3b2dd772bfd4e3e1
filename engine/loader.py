"""From settings to a running engine: find the model, choose the number format, size the cache, load the weights."""

import logging
from dataclasses import replace

import torch

from checkpoint import Progress, open_checkpoint
from contracts.errors import ConfigError
from engine.backend import Backend
from engine.cache.sizing import blocks_in, cache_nbytes, kv_layout, model_len, require_budgets
from engine.cpu.decoder import Decoder
from engine.cpu.kv_cache import KVCache
from engine.cpu.linear import FORMATS, int4_grid
from engine.cpu.runner import CpuRunner
from engine.cpu.weights import load_weights
from engine.cuda.loader import load_device_engine
from engine.device import gpu_index
from engine.engine import Engine
from engine.model_loader.checkpoint_weights import WeightSource, open_weights
from engine.sampling.sampler import Sampler
from engine.settings import EngineSettings
from kernels.cpu.isa import CpuIsa, apply_isa, is_bfloat16_fast, probe_isa
from process.memory_limit import available_nbytes

_log = logging.getLogger(__name__)

_MOST_BLOCK = 64  # attention's parts and tiles are multiples of it


def load_engine(settings: EngineSettings, progress: Progress | None = None) -> Engine:
    """Raises ConfigError, which says what to do, for a model or settings that cannot be served."""
    report = progress or _silent
    _require_sound(settings)
    settings = replace(settings, device=resolve_device(settings.device))
    _require_gpus(settings)
    if settings.device != "cpu":
        torch.cuda.set_device(settings.device)
        checkpoint = open_checkpoint(settings.model, progress=report)
        return load_device_engine(settings, checkpoint, report, device=torch.device(settings.device))
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    checkpoint = open_checkpoint(settings.model, progress=report)
    report("probe", 0, 1)
    source = open_weights(checkpoint)
    settings = replace(settings, dtype=resolve_dtype(settings, source))
    number_format = FORMATS[settings.dtype]
    layout = kv_layout(checkpoint, settings.block_size, number_format.kv_dtype)
    num_blocks = blocks_in(cache_nbytes(settings, layout, available_nbytes()), layout)
    max_model_len = model_len(checkpoint, settings, num_blocks * layout.block_size)
    weights = load_weights(checkpoint.config, source, number_format, report)
    model = Decoder(checkpoint.config, weights, max_model_len)
    cache = KVCache(layout, num_blocks)
    _log.info("%s ready: %s, context of %d tokens", checkpoint.name, settings.dtype, max_model_len)
    _log.info(
        "the KV cache holds %d tokens in %d MiB; TANDEM_KV_CACHE_MIB makes it larger or smaller",
        num_blocks * layout.block_size,
        num_blocks * layout.block_nbytes >> 20,
    )
    # Where prompts and answers are computed in different formats, an answer's KV is not what a prompt's would be.
    caches_answers = number_format.is_uniform
    backend = Backend(cache, CpuRunner(model, cache), Sampler(checkpoint.eos_token_ids), caches_answers)
    return Engine(settings, checkpoint, backend, max_model_len)


def _require_sound(settings: EngineSettings) -> None:
    """Raises ConfigError for what would start and then serve nothing."""
    if _MOST_BLOCK % settings.block_size:
        raise ConfigError(f"block_size is {settings.block_size}; it must be a power of 2 up to {_MOST_BLOCK}")
    require_budgets(settings, settings.block_size)


def _require_gpus(settings: EngineSettings) -> None:
    """Raises ConfigError where there are not as many as the model is to be shared by."""
    size = settings.tensor_parallel
    if size == 1:
        return
    if settings.device == "cpu":
        raise ConfigError(f"tensor_parallel is {size}, on the CPU; it is for GPUs: set device")
    count = torch.cuda.device_count()
    if (gpu_index(settings.device) or 0) + size > count:
        raise ConfigError(f"tensor_parallel is {size} from {settings.device} on; torch finds {count} GPUs")


def resolve_device(device: str) -> str:
    """cpu, or cuda:N; `auto`: the first GPU where there is one. Raises ConfigError for a device that is unknown, or
    absent.
    """
    is_named = device not in ("auto", "cpu")
    index = (gpu_index(device, "auto", "cpu") or 0) if is_named else 0
    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if is_named and count == 0:
        raise ConfigError(
            f"the device '{device}' needs an NVIDIA GPU and a torch that was built for it; torch finds none"
        )
    if index >= max(count, 1):
        raise ConfigError(
            f"the device '{device}' is not there; the GPUs that torch finds are cuda:0 to cuda:{count - 1}"
        )
    return f"cuda:{index}" if count else "cpu"


def resolve_dtype(settings: EngineSettings, source: WeightSource) -> str:
    """The name of a number format; caps oneDNN first where bfloat16 would crash. Raises ConfigError for an unknown
    name, and for one that this CPU or these weights can't have.

    `auto`: float16 weights, twice float32's decode rate and nearly its text; for the rows of prompts bfloat16 where
    this kind of CPU multiplies it much faster. For the rows of answers weights that are int4 in the file stay so if
    AVX-512 unpacks them: AVX2 does it slower than it reads float16 (0.9 times on an EPYC).
    """
    dtype = settings.dtype
    if dtype not in FORMATS and dtype != "auto":
        raise ConfigError(f"the dtype '{dtype}' is not supported; supported are auto, {', '.join(FORMATS)}")
    has_fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
    if dtype in ("float16", "mixed16", "mixed4", "int4", "int8") and not has_fbgemm:
        raise ConfigError(f"the dtype '{dtype}' needs an x86 CPU with AVX2; use float32")
    if dtype in ("int4", "mixed4") and not _is_int4(source):
        raise ConfigError(
            f"the dtype '{dtype}' is for weights that are int4 in their file (GGUF, Q4_1); use float16 or int8"
        )
    if dtype in ("float32", "float16"):
        return dtype
    isa = probe_isa(settings.cache_dir)
    apply_isa(isa)
    if dtype == "auto":
        return _fastest(isa, has_fbgemm, source)
    if dtype in ("bfloat16", "mixed16", "mixed4") and not isa.has_bfloat16:
        raise ConfigError(f"the dtype '{dtype}' multiplies bfloat16, which this CPU can't; use float16 or float32")
    return dtype


def _fastest(isa: CpuIsa, has_fbgemm: bool, source: WeightSource) -> str:
    if not has_fbgemm:
        return "float32"
    # Asked on every CPU: weights that do not fit their configuration are told of before they are loaded.
    takes_int4 = _is_int4(source) and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if is_bfloat16_fast(isa):
        return "mixed4" if takes_int4 else "mixed16"
    return "int4" if takes_int4 else "float16"


def _is_int4(source: WeightSource) -> bool:
    """Judged by a matrix that all families have; linear.pack_int4_if_exact then looks at each."""
    return int4_grid(source.tensor("model.layers.0.self_attn.o_proj.weight")) is not None


def _silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
