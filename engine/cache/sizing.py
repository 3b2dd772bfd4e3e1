"""The arithmetic of an engine's memory: how much context, how many KV blocks.

The bytes that a GPU has for them are counted in engine.cuda.loader.
"""

import hashlib
import logging
from dataclasses import dataclass, replace

import msgspec

from checkpoint import Checkpoint
from checkpoint.fingerprint import weights_fingerprint
from contracts.errors import ConfigError
from contracts.layout import KVGroup, KVLayout
from engine.cache.kv_groups import pages_of_sequence
from engine.settings import EngineSettings
from models.config import ModelConfig, Recurrence

MIN_BLOCKS = 2
"""The fewest blocks of a cache that an engine starts with."""
MIN_STATES = 4
"""The fewest states: two sequences' at a time, or those of one that comes from elsewhere."""
DEFAULT_TOKENS = 16384
"""The tokens that a cache in host memory holds where no setting sizes it: what a trial needs."""
_MEMORY_SHARE = 0.15
_MIN_NBYTES, _MAX_NBYTES = 256 << 20, 2 << 30
"""Such a cache takes at most this share of the memory that is available at start, the share within these bounds."""
_SETTING = "kv_cache_mib, TANDEM_KV_CACHE_MIB"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSize:
    """The blocks of a cache, the pages in each of its groups of short life, and the bytes of all these."""

    num_blocks: int
    num_pages: tuple[int, ...]
    nbytes: int


def kv_layout(
    checkpoint: Checkpoint, block_size: int, dtype: str, rounding: str, variant: str = "", by_span: bool = False
) -> KVLayout:
    """Return how KV lies in pages, of this `dtype`.

    Workers of another `rounding` hand over to it and share nothing.

    `variant`: set where KV is not to meet that of the model's other workers at all: the two parts of a rotary pair lie
    otherwise than side by side, or activations are rounded otherwise. `by_span`: layers that see a window or a segment
    are a group of their own; else all layers that attend are one. Recurrent layers always are a group of their own,
    whose pages are states in float32.
    """
    config = checkpoint.config
    model = f"{_fingerprint(config)}-{weights_fingerprint(checkpoint.path)}{variant}"
    layout = one_group_layout(config, block_size, dtype, model, rounding)
    if config.recurrence is not None:
        return msgspec.structs.replace(layout, groups=_with_state(config, config.recurrence, layout))
    if not by_span or not config.windowed_layers:
        return layout
    (whole,) = layout.groups
    kind, span = ("segment", config.segment) if config.segment else ("window", config.window)
    full = tuple(layer for layer in whole.layers if layer not in config.windowed_layers)
    short = msgspec.structs.replace(whole, kind=kind, span=span, layers=config.windowed_layers)
    groups = (msgspec.structs.replace(whole, layers=full), short) if full else (short,)
    return msgspec.structs.replace(layout, groups=groups)


def one_group_layout(config: ModelConfig, block_size: int, dtype: str, model: str = "", rounding: str = "") -> KVLayout:
    """Return the layout of a model all of whose layers are one group."""
    return KVLayout.uniform(
        model=model,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim if config.latent is None else config.latent.width,
        block_size=block_size,
        dtype=dtype,
        rounding=rounding,
        is_latent=config.latent is not None,
    )


def _with_state(config: ModelConfig, recurrence: Recurrence, layout: KVLayout) -> tuple[KVGroup, KVGroup]:
    """Return the groups of a model with recurrent layers."""
    (whole,) = layout.groups
    full = tuple(layer for layer in whole.layers if layer not in config.recurrent_layers)
    state = KVGroup(
        kind="state",
        layers=config.recurrent_layers,
        planes=("state",),
        num_kv_heads=recurrence.num_key_heads,
        head_dim=recurrence.state_width,
        block_size=layout.block_size,
        dtype="float32",
    )
    return msgspec.structs.replace(whole, layers=full), state


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


def cache_size(
    nbytes: int, layout: KVLayout, settings: EngineSettings, max_model_len: int, draft_nbytes: int = 0
) -> CacheSize:
    """Return what fits in `nbytes`.

    Each block has `draft_nbytes` of a draft head's beside those of the layout. A group of short life has pages for the
    sequences that may run, as many again for those that are handed over and for what may be found again, and for the
    prompts of a step; but for no more sequences than there would be if each had twice the blocks of its window. If
    there is no use in that, it has a page for every block.

    Raises ConfigError for fewer than MIN_BLOCKS.
    """
    if (index := state_group(layout)) is not None:
        return _size_with_states(nbytes, layout, index, settings, draft_nbytes)
    whole = blocks_in(nbytes, layout, draft_nbytes)
    short = [index for index, group in enumerate(layout.groups) if group.is_short]
    sizes = [layout.group_nbytes(index) for index in short]
    full_nbytes, short_nbytes = layout.block_nbytes + draft_nbytes - sum(sizes), sum(sizes)
    num_draft = 0 if settings.speculate == "off" else settings.draft_tokens
    most = [pages_of_sequence(layout, index, num_draft) for index in short]
    slack = layout.num_blocks(settings.max_batched_tokens) + 1
    in_whole = CacheSize(whole, (whole,) * len(short), whole * (full_nbytes + short_nbytes))
    if not short or settings.keeps_whole_blocks:
        return in_whole
    if not full_nbytes:  # blocks without pages take no room: as many as all sequences can have
        num_blocks = whole // max(most) * layout.num_blocks(max_model_len)
        is_of_use = whole >= 2 * max(most) + slack and num_blocks > whole
        return CacheSize(num_blocks, (whole,) * len(short), in_whole.nbytes) if is_of_use else in_whole
    half = int((nbytes - slack * short_nbytes) / (full_nbytes + short_nbytes / 2)) // 2
    num_pages = tuple(min(half, 2 * need * settings.max_num_seqs) + slack for need in most)
    left = nbytes - sum(count * size for count, size in zip(num_pages, sizes, strict=True))
    num_blocks = left // full_nbytes
    if any(count < 2 * need + slack for count, need in zip(num_pages, most, strict=True)) or num_blocks <= whole:
        return in_whole
    return CacheSize(num_blocks, num_pages, nbytes - left + num_blocks * full_nbytes)


def state_group(layout: KVLayout) -> int | None:
    """Return the index of the group of recurrent layers, or None."""
    return next((index for index, group in enumerate(layout.groups) if group.is_state), None)


def _size_with_states(
    nbytes: int, layout: KVLayout, index: int, settings: EngineSettings, draft_nbytes: int
) -> CacheSize:
    """Return what fits of a model with recurrent layers: states take half at most.

    Raises ConfigError for fewer than MIN_STATES or MIN_BLOCKS, and where whole blocks are to be kept.
    """
    if settings.keeps_whole_blocks:
        raise ConfigError(
            "keeps_whole_blocks is True, as tiers below the KV cache need it, and this model has recurrent layers, "
            "whose states are kept of some blocks alone: start the worker without tiers"
        )
    state_nbytes = layout.group_nbytes(index)
    full_nbytes = layout.block_nbytes - state_nbytes + draft_nbytes
    num_states = min(most_states(layout, index, settings), nbytes // 2 // state_nbytes)
    num_blocks = (nbytes - num_states * state_nbytes) // full_nbytes
    if num_states < MIN_STATES or num_blocks < MIN_BLOCKS:
        least = max(2 * MIN_STATES * state_nbytes, MIN_STATES * state_nbytes + MIN_BLOCKS * full_nbytes)
        raise ConfigError(
            f"kv_cache_nbytes is {nbytes}; {MIN_STATES} states of {state_nbytes} bytes and {MIN_BLOCKS} blocks of "
            f"{layout.block_size} tokens need {least}: raise it, a worker's {_SETTING}"
        )
    num_states = min(num_states, num_blocks)
    return CacheSize(num_blocks, (num_states,), num_states * state_nbytes + num_blocks * full_nbytes)


def most_states(layout: KVLayout, index: int, settings: EngineSettings) -> int:
    """Return how many states are of use: those of all that may run, and as many to be found again."""
    num_draft = 0 if settings.speculate == "off" else settings.draft_tokens
    return 2 * pages_of_sequence(layout, index, num_draft) * settings.max_num_seqs


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
        wanted = num_blocks * layout.block_nbytes
        if (index := state_group(layout)) is not None:
            wanted -= (num_blocks - most_states(layout, index, settings)) * layout.group_nbytes(index)
        return min(wanted, share)
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


def log_capacity(layout: KVLayout, size: CacheSize) -> None:
    """Log what a cache in host memory holds."""
    _log.info(
        "the KV cache holds %d tokens in %d MiB; TANDEM_KV_CACHE_MIB makes it larger or smaller",
        size.num_blocks * layout.block_size,
        size.nbytes >> 20,
    )
    short = [group for group in layout.groups if group.is_short]
    for group, num_pages in zip(short, size.num_pages, strict=True):
        if group.is_state:
            _log.info(
                "of %d recurrent layers it holds %d states of %.1f MiB, 2 for each running sequence",
                group.num_layers, num_pages, group.block_nbytes / (1 << 20),
            )  # fmt: skip
        elif num_pages < size.num_blocks:
            _log.info(
                "of %d layers, which see a %s of %d tokens, it holds %d of these tokens",
                group.num_layers, group.kind, group.span, num_pages * layout.block_size,
            )  # fmt: skip


def require_budgets(settings: EngineSettings, block_size: int) -> None:
    """Raise ConfigError for steps without room for a block of a prompt.

    What is handed over is cut at blocks.
    """
    for name in ("max_batched_tokens", "max_mixed_tokens"):
        value = getattr(settings, name)
        if value is not None and value < block_size:
            raise ConfigError(f"{name} is {value}; a step needs room for a block of a prompt, {block_size} tokens")
