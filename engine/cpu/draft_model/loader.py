"""The loader of a draft model beside its target on the CPU."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from checkpoint import Checkpoint, Progress
from contracts.errors import ConfigError
from contracts.layout import ITEM_NBYTES, KVGroup, KVLayout
from engine.backend import Drafting, Runner
from engine.cache.sizing import kv_layout
from engine.cpu.decoder import Decoder
from engine.cpu.draft_model.drafter import ModelDrafter
from engine.cpu.draft_model.reading_runner import ReadingRunner
from engine.cpu.format_choice import resolve_dtype
from engine.cpu.joint_cache import GroupPages
from engine.cpu.kv_cache import KVCache
from engine.cpu.linear import FORMATS
from engine.cpu.native.choice import NATIVE, chosen_kernels
from engine.cpu.native.runner import NativeRunner
from engine.cpu.native.shared_model import KV_DTYPE, load_shared_model
from engine.cpu.native.threads import start_threads
from engine.cpu.runner import CpuRunner
from engine.cpu.weight_loader import load_weights
from engine.model_loader.checkpoint_weights import StoredWeightSource, open_weights
from engine.settings import EngineSettings
from engine.speculative.named_drafter import open_named_model
from engine.speculative.proposer import spare_blocks
from kernels.cpu.native import NativeKernels

_COUNT_NBYTES = 4
"""The row of a block: how many of its tokens were read, int32."""


@dataclass(frozen=True)
class DraftModel:
    """A draft model that fits, before its weights are read.

    `layout` has two groups: of each block a row that says how much of it was read, and KV. The row is the first, since
    groups are copied in order: whoever gets a block while it is read on must not get a count of KV that came later.
    `kernels`: the native ones, if they compute it.
    """

    checkpoint: Checkpoint
    source: StoredWeightSource
    kernels: NativeKernels | None
    dtype: str
    layout: KVLayout
    num_tokens: int

    @property
    def block_nbytes(self) -> int:
        return self.layout.block_nbytes

    def drafting(
        self, target: Runner, num_blocks: int, settings: EngineSettings, progress: Progress
    ) -> tuple[Drafting, list[GroupPages]]:
        """Return the drafter, which reads the batches of `target`, and the pages of its groups."""
        row, kv = self.layout.groups
        cache = KVCache(self.layout.of_groups([1]), num_blocks + settings.max_num_seqs * spare_blocks(kv.block_size))
        rows = np.zeros((1, num_blocks, row.page_nbytes(1)), np.uint8)
        runner, read_N = self._runner(cache, settings, progress), rows[0].view(np.int32)[:, 0]
        drafter = ModelDrafter(runner, read_N, kv.block_size, self.num_tokens, self.checkpoint.config.max_model_len)
        pages = [GroupPages(row, rows), GroupPages(kv, cache.pool_bytes)]
        return Drafting(drafter, ReadingRunner(target, drafter)), pages

    def _runner(self, cache: KVCache, settings: EngineSettings, progress: Progress) -> Runner:
        config = self.checkpoint.config
        if self.kernels is not None:
            start_threads(self.kernels, torch.get_num_threads())
            arguments = settings, self.checkpoint, self.source, self.kernels, cache, config.max_model_len, progress
            return NativeRunner(self.kernels, load_shared_model(*arguments))
        weights = load_weights(config, self.source, FORMATS[self.dtype], progress)
        return CpuRunner(Decoder(config, weights, config.max_model_len), cache)


def open_draft_model(
    settings: EngineSettings, checkpoint: Checkpoint, target: KVLayout, dtype: str
) -> DraftModel | None:
    """Return the draft model that settings name, or None if they name none; `dtype` is the target's.

    In float32 both are, else the draft model takes what suits its file here. Raises ConfigError as open_named_model.
    """
    found = open_named_model(settings, checkpoint)
    if found is None:
        return None
    if found.config.recurrence is not None:
        raise ConfigError(f"speculate is '{settings.speculate}', a model with recurrent layers: these draft for none")
    longest = min(found.config.max_model_len, checkpoint.config.max_model_len)
    found = replace(found, config=replace(found.config.for_context(longest), max_model_len=longest))
    own = replace(settings, dtype="float32" if dtype == "float32" else "auto")
    source = open_weights(found)
    kernels = chosen_kernels(own, found, source)
    dtype = NATIVE if kernels is not None else resolve_dtype(own, source, found.config)
    kv_dtype = KV_DTYPE if kernels is not None else FORMATS[dtype].kv_dtype
    layout = _layout(kv_layout(found, settings.block_size, kv_dtype, dtype), target)
    num_tokens = min(found.config.vocab_size, checkpoint.config.vocab_size)
    return DraftModel(found, source, kernels, dtype, layout, num_tokens)


def _layout(own: KVLayout, target: KVLayout) -> KVLayout:
    """Return the layout of a draft model's state beside its target's, from that of its own KV."""
    group = own.only_group
    kv = msgspec.structs.replace(group, kind="draft", weights=f"{own.model}-{own.rounding}")
    row = KVGroup(
        kind="draft_row",
        layers=(0,),
        planes=("row",),
        num_kv_heads=1,
        head_dim=_COUNT_NBYTES // ITEM_NBYTES[group.dtype],
        block_size=group.block_size,
        dtype=group.dtype,
        weights=kv.weights,
    )
    return KVLayout(model=target.model, block_size=target.block_size, groups=(row, kv))
