"""The way from settings to a running engine.

Find the model, load it on its device, put an engine before it.
"""

from dataclasses import replace

import torch

from checkpoint import Checkpoint, Progress, open_checkpoint
from contracts.errors import ConfigError
from engine.cache.sizing import require_budgets
from engine.cpu.loader import load_cpu_backend
from engine.cuda.loader import OpenModel, load_device_backend, open_model
from engine.device import gpu_index
from engine.engine import Engine
from engine.model_loader.checkpoint_weights import WeightSource
from engine.settings import EngineSettings

_MOST_BLOCK = 64  # attention's parts and tiles are multiples of it


def load_engine(settings: EngineSettings, progress: Progress | None = None) -> Engine:
    """Return an engine of the model and the device that settings name.

    Raises ConfigError, which says what to do, for a model or settings that cannot be served.
    """
    report = progress or _silent
    _require_sound(settings)
    settings = replace(settings, device=resolve_device(settings.device))
    _require_gpus(settings)
    if settings.device == "cpu":
        checkpoint = open_checkpoint(settings.model, progress=report)
        return Engine(settings, checkpoint, load_cpu_backend(settings, checkpoint, report))
    torch.cuda.set_device(settings.device)
    checkpoint = open_checkpoint(settings.model, progress=report)
    return load_device_engine(settings, checkpoint, report, device=torch.device(settings.device))


def load_device_engine(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    progress: Progress,
    source: WeightSource | None = None,
    device: torch.device | None = None,
    reopen: OpenModel = open_model,
) -> Engine:
    """Return an engine on a GPU; see cuda.loader.load_device_backend."""
    return Engine(settings, checkpoint, load_device_backend(settings, checkpoint, progress, source, device, reopen))


def _require_sound(settings: EngineSettings) -> None:
    """Raises ConfigError for what would start and then serve nothing."""
    if _MOST_BLOCK % settings.block_size:
        raise ConfigError(f"block_size is {settings.block_size}; it must be a power of 2 up to {_MOST_BLOCK}")
    require_budgets(settings, settings.block_size)
    if settings.has_lora and resolve_device(settings.device) != "cpu":
        name = "lora_modules" if settings.lora_modules else "enable_lora"
        raise ConfigError(f"{name} is set, on {settings.device}; adapters are served on CPUs: set device to cpu")


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
    """Return cpu, or cuda:N; `auto`: the first GPU where there is one.

    Raises ConfigError for a device that is unknown, or absent.
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


def _silent(stage: str, done: int, total: int) -> None:
    """Take progress that nobody watches."""
