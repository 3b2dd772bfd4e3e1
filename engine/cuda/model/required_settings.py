"""The settings and models that a GPU cannot serve, refused before anything is read or started."""

import torch

from checkpoint import Checkpoint
from contracts.errors import ConfigError
from engine.cache.sizing import require_budgets
from engine.cuda.model.format_choice import resolve_device_dtype
from engine.cuda.model.missing_features import missing_feature
from engine.settings import EngineSettings
from engine.speculative.choice import max_draft_rows
from kernels import caps

MIN_BLOCK_SIZE = 64
"""The kernels were tuned for pages of so many tokens."""


def require_settings(settings: EngineSettings, checkpoint: Checkpoint, device: torch.device) -> caps.Caps:
    """Return what the device can do. Raises ConfigError, which names the setting."""
    if lacking := missing_feature(checkpoint.config):
        raise ConfigError(f"a model with {lacking} is not supported on a GPU: set device to cpu")
    found = caps.detect(device.type)
    if found.triton_error:
        raise ConfigError(caps.unbuildable(found))
    resolve_device_dtype(settings.dtype, checkpoint, found.cc)
    require_budgets(settings, max(settings.block_size, MIN_BLOCK_SIZE))
    max_draft_rows(settings)
    return found
