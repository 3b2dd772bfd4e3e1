"""The arithmetic of an engine's memory: how much context, how many KV blocks.

The bytes that a GPU has for them are counted in engine.cuda.loader.
"""

import hashlib
import logging
from dataclasses import replace

import msgspec

from checkpoint import Checkpoint
from checkpoint.fingerprint import weights_fingerprint
from contracts.errors import ConfigError
from contracts.layout import KVLayout
from engine.settings import EngineSettings
from models.config import ModelConfig

MIN_BLOCKS = 2
"""The fewest blocks of a cache that an engine starts with."""
DEFAULT_TOKENS = 16384
"""The tokens that a cache in host memory holds where no setting sizes it: what a trial needs."""
_MEMORY_SHARE = 0.15
_MIN_NBYTES, _MAX_NBYTES = 256 << 20, 2 << 30
"""Such a cache takes at most this share of the memory that is available at start, the share within these bounds."""
_SETTING = "kv_cache_mib, TANDEM_KV_CACHE_MIB"
_log = logging.getLogger(__name__)


def kv_layout(checkpoint: Checkpoint, block_size: int, dtype: str, rounding: str, variant: str = "") -> KVLayout:
    """Return how KV lies in pages, of this `dtype`.

    Workers of another `rounding` hand over to it and share nothing.

    `variant`: set where KV is not to meet that of the model's other workers at all: the two parts of a rotary pair lie
    otherwise than side by side, or activations are rounded otherwise.
    """
    config = checkpoint.config
    return KVLayout.uniform(
        model=f"{_fingerprint(config)}-{weights_fingerprint(checkpoint.path)}{variant}",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        rounding=rounding,
    )


def _fingerprint(config: ModelConfig) -> str:
    return hashlib.blake2b(msgspec.json.encode(config, order="sorted"), digest_size=8).hexdigest()


def blocks_in(nbytes: int, layout: KVLayout, draft_nbytes: int = 0) -> int:
    """Return how many blocks fit where each shard has `nbytes`; `draft_nbytes` of each are a draft head's.

    Raises ConfigError for fewer than MIN_BLOCKS.
    """
    block_nbytes = layout.shard_nbytes + draft_nbytes
    if nbytes < MIN_BLOCKS * block_nbytes:
        raise ConfigError(
            f"kv_cache_nbytes is {nbytes}; one block of {layout.block_size} tokens takes {block_nbytes}: "
            f"raise it, a worker's {_SETTING}"
        )
    return nbytes // block_nbytes


def cache_nbytes(settings: EngineSettings, layout: KVLayout, available_nbytes: int) -> int:
    """Return the size of a cache in host memory.

    What settings say, or DEFAULT_TOKENS or one context of a `max_model_len` that is set, as far as a share of the
    memory holds them.

    Raises ConfigError for more than is available: to touch it all would end this process, or another.
    """
    wanted = settings.kv_cache_nbytes
    if wanted is None:
        num_blocks = layout.num_blocks(max(DEFAULT_TOKENS, settings.max_model_len or 0))
        share = min(max(int(available_nbytes * _MEMORY_SHARE), _MIN_NBYTES), _MAX_NBYTES)
        return min(num_blocks * layout.block_nbytes, share)
    if wanted > available_nbytes:
        raise ConfigError(
            f"kv_cache_nbytes is {wanted}; {available_nbytes} are available: lower it, a worker's {_SETTING}"
        )
    return wanted


def for_context(checkpoint: Checkpoint, settings: EngineSettings) -> Checkpoint:
    """Return the checkpoint as it serves the contexts that settings or model ask for."""
    return replace(checkpoint, config=checkpoint.config.for_context(wanted_model_len(checkpoint, settings)))


def wanted_model_len(checkpoint: Checkpoint, settings: EngineSettings) -> int:
    """Return the context that settings or model ask for. Raises ConfigError for more than the model has."""
    longest = checkpoint.config.max_model_len
    wanted = settings.max_model_len or longest
    if wanted > longest:
        raise ConfigError(f"max_model_len is {wanted}; {checkpoint.name} was trained for {longest} tokens")
    return wanted


def model_len(checkpoint: Checkpoint, settings: EngineSettings, capacity_tokens: int) -> int:
    """Return the context that fits, with a warning if it is not the model's.

    Raises ConfigError if settings ask for more.
    """
    wanted = wanted_model_len(checkpoint, settings)
    if settings.max_model_len and wanted > capacity_tokens:
        raise ConfigError(
            f"max_model_len is {wanted}; the KV cache holds {capacity_tokens} tokens: raise kv_cache_nbytes, "
            f"a worker's {_SETTING}"
        )
    if wanted > capacity_tokens:
        _log.warning(
            "contexts have at most %d tokens, where %s has %d: the KV cache holds no more (a worker's %s)",
            capacity_tokens, checkpoint.name, wanted, _SETTING,
        )  # fmt: skip
    return min(wanted, capacity_tokens)


def log_capacity(layout: KVLayout, num_blocks: int, draft_nbytes: int) -> None:
    """Log what a cache in host memory holds.

    Each block has `draft_nbytes` of a head beside those of the layout.
    """
    _log.info(
        "the KV cache holds %d tokens in %d MiB; TANDEM_KV_CACHE_MIB makes it larger or smaller",
        num_blocks * layout.block_size,
        num_blocks * (layout.block_nbytes + draft_nbytes) >> 20,
    )


def require_budgets(settings: EngineSettings, block_size: int) -> None:
    """Raise ConfigError for steps without room for a block of a prompt.

    What is handed over is cut at blocks.
    """
    for name in ("max_batched_tokens", "max_mixed_tokens"):
        value = getattr(settings, name)
        if value is not None and value < block_size:
            raise ConfigError(f"{name} is {value}; a step needs room for a block of a prompt, {block_size} tokens")
